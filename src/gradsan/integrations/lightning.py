"""Lightning callback: ``Trainer(callbacks=[GradsanCallback()])`` watches every ``fit``.

``lightning`` and ``pytorch_lightning`` are two packages with one interface; the one that the program has imported is
used.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

from gradsan._terms import Mode
from gradsan.integrations._training import Language, Training, options_of, rank_among
from gradsan.model import Report

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")


def _base() -> Any:
    for name in sorted(_PACKAGES, key=lambda name: name not in sys.modules):
        try:
            return import_module(name).Callback
        except ImportError:
            continue
    raise ImportError("neither lightning nor pytorch_lightning can be imported", name="lightning")


class GradsanCallback(_base()):  # type: ignore[misc]
    """Watches from ``setup`` to ``teardown`` of a ``fit``, or to the exception that ends it.

    A failing training raises the same error as without gradsan, with the short diagnosis as an exception note; the
    report goes to stderr and into the files. Faults that PyTorch has not noticed are reported at the end. Losses and
    gradients stay the same.

    The keywords are the options of ``gradsan run``; those not given come from ``GRADSAN_OPTIONS`` and
    ``[tool.gradsan]``. With several processes each writes files of its own, with its rank in the name.
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
        self._report: Report | None = None

    @property
    def report(self) -> Report | None:
        """The report of the last ``fit`` that has ended; None before."""
        return self._report

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Begin watching a ``fit``. Raises ValueError for a file that cannot be written."""
        if stage == "fit":
            self._end()
            training = Training(self._options, rank_among(trainer.global_rank, trainer.world_size))
            training.begin()
            self._training = training

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Explain the exception that ends the ``fit``."""
        if self._training is not None:
            self._training.fail(exception)
            self._end()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Publish the report."""
        self._end()

    def _end(self) -> None:
        training, self._training = self._training, None
        if training is not None:
            self._report = training.end()
