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
from gradsan.integrations._training import WatchedTraining

_STEP = "training_step"


class GradsanCallback(WatchedTraining, TrainerCallback):  # type: ignore[misc]
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

    _release: Callable[[], None] | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin watching. Raises ValueError for a file that cannot be written."""
        self._begin(args.process_index, args.world_size)
        trainer = _trainer_of(self)
        if trainer is not None:
            self._release = _on_failing_step(trainer, self._fail)
        atexit.register(self._end)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Publish the report."""
        self._end()

    def _end(self) -> None:
        release, self._release = self._release, None
        if release is not None:
            release()
        atexit.unregister(self._end)
        super()._end()


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
