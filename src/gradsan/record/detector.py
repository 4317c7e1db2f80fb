"""Detector: base class of all that look for one fault that PyTorch does not report.

:mod:`gradsan._watching` lists the detectors, makes each of them from the :class:`Run` and calls the hooks below while a
stretch runs. A hook that is not overridden costs nothing. KnownConflicts go to :meth:`Run.report` or :meth:`Run.keep`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast

from gradsan.model import Failure
from gradsan.record.log import RawStack
from gradsan.record.patches import Patches
from gradsan.record.recorder import FINDINGS_KEPT
from gradsan.record.stacks import symbolise
from gradsan.record.steps import RawBackward, Settling

if TYPE_CHECKING:
    from gradsan.model import Clue, Conflict, Deviation
    from gradsan.record.recorder import Recorder

T = TypeVar("T")

Guard = Callable[[Callable[[], object]], None]
"""Runs some work of gradsan's so that its failure becomes a blind spot instead of an error of the program."""

ENTRIES_A_QUESTION = 16


class Run:
    """Logs, listeners and findings of one recorder, which all of its detectors share, and the detectors themselves."""

    settling: Settling
    """The optimizers that have stepped."""

    def __init__(self, recorder: Recorder) -> None:
        """Share the logs and lists of ``recorder``."""
        self.core, self.steps, self.backwards = recorder.core, recorder.steps, recorder.backwards
        self.listeners, self.guard = recorder.listeners, recorder.guard
        self.conflicts, self.failures, self.nonfinite = recorder.conflicts, recorder.failures, recorder.nonfinite
        self.keep = recorder.keep
        """Takes a function that makes a conflict, and keeps the conflict."""
        self._made: dict[object, object] = {}

    def get(self, kind: type[T]) -> T:
        """Return the one ``kind`` of this run, made of the run alone when it is first asked for."""
        if kind not in self._made:
            self._made[kind] = cast("Callable[[Run], T]", kind)(self)
        return cast("T", self._made[kind])

    def put(self, made: T) -> T:
        """Have ``made`` be the one of its class in this run."""
        self._made[type(made)] = made
        return made

    def report(self, failure: Failure) -> None:
        """Keep a finding, unless there are as many as a report holds."""
        if len(self.failures) < FINDINGS_KEPT:
            self.failures.append(failure)

    def stepped_optimizers(self) -> list[Any]:
        """Return the live optimizers that have stepped."""
        return self.settling.optimizers


class KnownConflicts:
    """Conflicts of a run by a key of their own, bounded in number; one that is found again is counted."""

    def __init__(self, run: Run) -> None:
        """Add to the conflicts of ``run``, none of which has a key yet."""
        self._found = run.conflicts
        self._known: dict[Any, int] = {}

    def forget(self) -> None:
        """Begin anew: findings of an earlier stretch of watching do not count for this one."""
        self._known.clear()

    def knows(self, stack: RawStack) -> bool:
        """Whether a conflict has been found by a write at the line of ``stack``, and not measured as harmless."""
        return any(is_written_at(conflict, stack) for conflict in self._found if not conflict.is_harmless)

    def has(self, key: Any) -> bool:
        """Whether the conflict known by ``key`` has been found."""
        return key in self._known

    def count(self, key: Any) -> bool:
        """Count the conflict known by ``key`` once more; return whether there is one."""
        at = self._known.get(key)
        if at is None or at >= len(self._found):
            return False
        self._found[at] = replace(self._found[at], count=self._found[at].count + 1)
        return True

    def add(self, key: Any, make: Callable[[], Conflict]) -> None:
        """Count the conflict known by ``key``, or have it made."""
        if not self.count(key) and not self.is_full:
            made = make()
            self._known[key] = len(self._found)
            self._found.append(made)

    @property
    def is_full(self) -> bool:
        """Whether the run has as many conflicts as are kept."""
        return len(self._found) >= FINDINGS_KEPT


def is_written_at(conflict: Conflict, stack: RawStack) -> bool:
    """Whether one of the writes of a conflict stands at the line of ``stack``."""
    line = symbolise(stack).user_frame
    return any(write.site.user_frame == line for write in conflict.writes)


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


class Finder(Detector):
    """Base class of detectors whose notes are emptied as watching begins."""

    def __init__(self, run: Run) -> None:
        self._core, self._listeners, self._found = run.core, run.listeners, run.report
        self._noted: list[Any] = []
        self._described = self._notes(set[Hashable]())

    def _notes(self, container: T) -> T:
        """Return a container that :meth:`forget` empties."""
        self._noted.append(container)
        return container

    def _report_at(self, row: str, stack: RawStack, *clues: Clue, if_meant: Deviation | None = None) -> None:
        """Report a failure of ``row`` at the call with ``stack``: a backward, or a step."""
        self._found(Failure(row, "", "", symbolise(stack), clues, raised=False, if_meant=if_meant))

    def forget(self) -> None:
        """Begin anew, at the start of a stretch of watching."""
        for one in self._noted:
            one.clear()


class Sweep:
    """Schedule for removing dead entries from a table: seldom enough for a constant cost per lookup at any length.

    Dead entries stay a while longer; no other storage gets the address of one that is referred to weakly.
    """

    __slots__ = ("_asked",)

    def __init__(self) -> None:
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
