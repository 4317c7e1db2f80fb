"""Detector: base class of all that look for one fault that PyTorch does not report.

:mod:`gradsan._watching` makes each detector with the logs that it reads and calls the hooks below while a stretch runs.
A hook that is not overridden costs nothing. Findings go to the sink that the detector was made with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import ClassVar

from gradsan.record.patches import Patches
from gradsan.record.steps import RawBackward

Guard = Callable[[Callable[[], object]], None]
"""Runs some work of gradsan's so that its failure becomes a blind spot instead of an error of the program."""

ENTRIES_A_QUESTION = 16


class Detector:
    """Hooks that a detector may override; ``part`` is its name in reports where torch does not take its patches."""

    part: ClassVar[str] = ""
    is_hushed: ClassVar[bool] = True
    """Whether its patches only read tensors, so the program's own ``__torch_function__`` is not called for them."""

    def install(self, patches: Patches, guard: Guard) -> None:
        """Put patches into torch as watching begins; ``patches`` undoes them."""

    def forget(self) -> None:
        """Forget everything seen before, as watching begins."""

    def before_round(self, entry: RawBackward, rounds: int) -> None:
        """Called before a line's 1st, 2nd, 4th, 8th … backward call; ``entry`` is that call in the core's log."""

    def settle(self) -> None:
        """Report what was waiting for more evidence, as watching ends."""


class Sweep:
    """Schedule for removing dead entries from a table: seldom enough for a constant cost per lookup at any length.

    Dead entries stay a while longer; no other storage gets the address of one that is referred to weakly.
    """

    __slots__ = ("_asked",)

    def __init__(self) -> None:
        """Start with no lookup counted."""
        self._asked = 0

    def is_due(self, entries: int) -> bool:
        """Count a lookup, and return whether to search a table of so many entries now."""
        self._asked += 1
        if self._asked * ENTRIES_A_QUESTION < entries:
            return False
        self._asked = 0
        return True


def overriding(detectors: Iterable[Detector], hook: str) -> tuple[Detector, ...]:
    """Return the detectors that override ``hook``."""
    return tuple(one for one in detectors if getattr(type(one), hook) is not getattr(Detector, hook))
