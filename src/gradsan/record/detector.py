"""Detector: looks for one thing that PyTorch does not report.

:mod:`gradsan._watching` makes each detector with what it needs and calls the hooks below while somebody watches. A hook
that is not overridden costs nothing. What is found goes to the sink that the detector was made with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import ClassVar

from gradsan.record.patches import Patches
from gradsan.record.steps import RawBackward

Guard = Callable[[Callable[[], object]], None]
"""Does some work of gradsan's so that its failure becomes a blind spot instead of the program's."""

ENTRIES_A_QUESTION = 16


class Detector:
    """The events that a detector may hear of; ``part`` names it where this torch does not take its patches."""

    part: ClassVar[str] = ""
    is_hushed: ClassVar[bool] = True
    """Whether its patches only read tensors, so that the program's own ``__torch_function__`` is not asked."""

    def install(self, patches: Patches, guard: Guard) -> None:
        """Watching begins: put into torch what is needed; ``patches`` puts it back."""

    def forget(self) -> None:
        """Watching begins: nothing of what was seen before counts any more."""

    def before_round(self, entry: RawBackward, rounds: int) -> None:
        """A line calls backward for the 1st, 2nd, 4th, 8th … time; ``entry`` is that call in the core's log."""

    def settle(self) -> None:
        """Watching ends: report what was waiting for more evidence."""


class Sweep:
    """How often a table is searched for what died: so seldom that it costs each question the same, however long it is.

    What died stays a while longer; nobody else is given the number of a storage that is referred to weakly.
    """

    __slots__ = ("_asked",)

    def __init__(self) -> None:
        """Start with no question asked."""
        self._asked = 0

    def is_due(self, entries: int) -> bool:
        """Whether to search a table of so many entries now."""
        self._asked += 1
        if self._asked * ENTRIES_A_QUESTION < entries:
            return False
        self._asked = 0
        return True


def overriding(detectors: Iterable[Detector], hook: str) -> tuple[Detector, ...]:
    """Those that have a ``hook`` of their own."""
    return tuple(one for one in detectors if getattr(type(one), hook) is not getattr(Detector, hook))
