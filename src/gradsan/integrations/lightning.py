"""Lightning callback: ``Trainer(callbacks=[GradsanCallback()])`` watches every ``fit``.

``lightning`` and ``pytorch_lightning`` are two packages with one interface; the one that the program has imported is
used.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

from gradsan.integrations._training import WatchedTraining

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")


def _base() -> Any:
    for name in sorted(_PACKAGES, key=lambda name: name not in sys.modules):
        try:
            return import_module(name).Callback
        except ImportError:
            continue
    raise ImportError("neither lightning nor pytorch_lightning can be imported", name="lightning")


class GradsanCallback(WatchedTraining, _base()):  # type: ignore[misc]
    """Watches from ``setup`` to ``teardown`` of a ``fit``, or to the exception that ends it.

    A failing training raises the same error as without gradsan, with the short diagnosis as an exception note; the
    report goes to stderr and into the files. Faults that PyTorch has not noticed are reported at the end. Losses and
    gradients stay the same.

    The keywords are the options of ``gradsan run``; those not given come from ``GRADSAN_OPTIONS`` and
    ``[tool.gradsan]``. With several processes each writes files of its own, with its rank in the name.
    """

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Begin watching a ``fit``. Raises ValueError for a file that cannot be written."""
        if stage == "fit":
            self._begin(trainer.global_rank, trainer.world_size)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Explain the exception that ends the ``fit``."""
        self._fail(exception)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Publish the report."""
        self._end()
