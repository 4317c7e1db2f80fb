"""Transformers callback: ``Trainer(…, callbacks=[GradsanCallback()])`` watches every ``train()``."""

from __future__ import annotations

import atexit
import functools
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from transformers import Trainer, TrainerCallback

from gradsan import _torch
from gradsan._terms import Mode
from gradsan.integrations._training import Language, Training, options_of, rank_among
from gradsan.model import Report

_STEP = "training_step"


class GradsanCallback(TrainerCallback):  # type: ignore[misc]
    """Watches from the beginning of ``train()`` to its end, or to the exception that ends it.

    A failing training raises the same error as without gradsan, with the short diagnosis as an exception note; the
    report goes to stderr and into the files. Faults that PyTorch has not noticed are reported at the end. Losses and
    gradients stay the same.

    The keywords are the options of ``gradsan run``; those not given come from ``GRADSAN_OPTIONS`` and
    ``[tool.gradsan]``. With several processes each writes files of its own, with its rank in the name.

    Callbacks do not get exceptions. Those of ``training_step``, which runs forward and backward, are caught by a
    wrapper and reraised; if another one ends the training, the report comes with the next training or at the end of the
    process.
    """

    def __init__(
        self,
        mode: Mode | None = None,
        *,
        language: Language | None = None,
        json: str | None = None,
        html: str | None = None,
        sarif: str | None = None,
        quiet: bool | None = None,
        stacks: bool | None = None,
    ) -> None:
        """Choose how to watch.

        Raises:
            ValueError: for an invalid option.
        """
        said = {"lang": language, "json": json, "html": html, "sarif": sarif, "quiet": quiet, "stacks": stacks}
        self._options = options_of(mode, said)
        self._training: Training | None = None
        self._release: Callable[[], None] | None = None
        self._report: Report | None = None

    @property
    def report(self) -> Report | None:
        """The report of the last training that has ended; None before."""
        return self._report

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin watching. Raises ValueError for a file that cannot be written."""
        self._end()
        training = Training(self._options, rank_among(args.process_index, args.world_size))
        training.begin()
        self._training = training
        trainer = _trainer_of(self)
        if trainer is not None:
            self._release = _on_failing_step(trainer, self._fail)
        atexit.register(self._end)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Publish the report."""
        self._end()

    def _fail(self, error: BaseException) -> None:
        if self._training is not None:
            self._training.fail(error)
            self._end()

    def _end(self) -> None:
        training, self._training = self._training, None
        release, self._release = self._release, None
        if release is not None:
            release()
        if training is not None:
            atexit.unregister(self._end)
            self._report = training.end()


def _trainer_of(callback: TrainerCallback) -> Any:
    """Return the Trainer that is calling ``callback``, found on the stack; None if unknown."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        owner = _torch.locals_of(frame).get("self")
        if isinstance(owner, Trainer) and callback in owner.callback_handler.callbacks:
            return owner
        frame = frame.f_back
    return None


def _on_failing_step(trainer: Any, listener: Callable[[BaseException], None]) -> Callable[[], None]:
    """Call ``listener`` with exceptions of ``trainer.training_step``; return a function that restores the method."""
    step = trainer.training_step

    @functools.wraps(step)
    def watched(*args: Any, **kwargs: Any) -> Any:
        try:
            return step(*args, **kwargs)
        except BaseException as error:
            listener(error)
            raise

    had = vars(trainer).get(_STEP)
    setattr(trainer, _STEP, watched)

    def release() -> None:
        if had is not None:
            setattr(trainer, _STEP, had)
        elif vars(trainer).get(_STEP) is watched:
            delattr(trainer, _STEP)

    return release
