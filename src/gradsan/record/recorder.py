"""Recorder: switches watching on and off, and keeps the findings. One per process, as torch's hooks are."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple, Protocol

from gradsan._errors import GradsanError
from gradsan.model import Conflict, Copies, Evidence, Failure, Message, Moment, NonFinite, Seen
from gradsan.record import log, writes
from gradsan.record.backwards import Backwards
from gradsan.record.demands import Asked, Demands, Found
from gradsan.record.guarding import Guard
from gradsan.record.listeners import Listeners
from gradsan.record.patches import Patches
from gradsan.record.steps import RawBackward, Steps, as_backward, moments

FINDINGS_KEPT = 1_000
"""The most conflicts, and the most failures, that are kept at a time."""


class Mark(NamedTuple):
    """Counters of the recorder at some point of the run: findings, events and the clock."""

    conflicts: int = 0
    failures: int = 0
    saves: int = 0
    writes: int = 0
    backwards: int = 0
    steps: int = 0
    clock: int = 0
    nonfinite: int = 0


class Findings(Protocol):
    """Events that the recorder hands to the wired detectors (:mod:`gradsan._watching`)."""

    problems: list[Message] | None
    """Problems of gradsan with this torch; None as long as nothing was watched."""

    def begin(self, install: Callable[[], None]) -> None:
        """The first stretch begins; ``install`` puts the recorder's own patches in."""

    def follow(self, modes: Collection[str]) -> None:
        """Stretches of these modes run now."""

    def settle(self) -> None:
        """The last stretch has ended."""

    def copies(self) -> tuple[Copies, ...]:
        """Return the memory that copies of saved values took, by device."""

    def backward_failed(self, entry: RawBackward, error: BaseException) -> Conflict | Failure | None:
        """Return the finding that explains ``error``, with which a backward has ended; None where there is none."""

    def program_ended_by(self, error: BaseException) -> None:
        """An exception has ended the program, or left a watched block."""


class Recorder:
    """Clock, logs and findings of this process."""

    def __init__(self, native: bool | None = None) -> None:
        """Prepare, without touching torch yet. ``native`` as in :func:`gradsan.record.log.make_core`."""
        self.core = log.make_core(native)
        self.guard = Guard()
        self.listeners = Listeners(self.core, self.guard)
        self.steps = Steps(self.core)
        self.backwards = Backwards(self.core)
        self.demands = Demands()
        self.patches = Patches()
        self.on_findings: tuple[Callable[[Conflict | Failure], None], ...] = ()
        """Called with each new finding when it is kept."""
        self.explainers: tuple[Callable[[BaseException, Conflict | Failure | None], None], ...] = ()
        """Called with each error that leaves a backward, and the finding that explains it or None."""
        self.conflicts: list[Conflict] = Found(self._found)
        self.failures: list[Failure] = Found(self._found)
        self.nonfinite: list[NonFinite] = []
        self._plan: writes.Plan | None = None
        self._stretches: dict[int, str] = {}
        self._stretch_numbers = itertools.count(1)
        self._lock = threading.Lock()
        self.core.on_failure = self._on_failure
        self.core.lets_pass = GradsanError
        self.watching = _watching_for(self)

    @property
    def is_on(self) -> bool:
        """Whether a stretch of watching is running."""
        return bool(self._stretches)

    def start(self, mode: str = "watch", asked: Asked | None = None) -> int:
        """Begin a stretch of watching and return its number; the strongest mode of all running stretches is in force.

        ``asked`` holds the demands of this stretch beyond a report.
        """
        with self._lock:
            number = next(self._stretch_numbers)
            is_first = not self._stretches
            self._stretches[number] = mode
            self.demands.begin(number, mode, asked if asked is not None else Asked())
            if is_first:
                # Each stretch of watching reports its own blind spots.
                self.guard.blind_spots.clear()
                self.watching.begin(self._install)
            # Last, because patches are undone in reverse order.
            self._follow_modes()
        return number

    def _install(self) -> None:
        self.guard.install("operations", self._watch_operations)
        self.guard.install("steps", partial(self.steps.install, self.patches))

    def _watch_operations(self) -> None:
        if self._plan is None:
            self._plan = writes.plan(self.core)
        writes.install(self.core, self.patches, self._plan)

    def _follow_modes(self) -> None:
        self.listeners.call_before_backward(self.demands.before_backward, bool(self.demands.stop))
        self.watching.follow(set(self._stretches.values()))

    def stop(self, number: int) -> None:
        """End the stretch with that number, in any order; the end of the last one removes every hook and patch."""
        with self._lock:
            if self._stretches.pop(number, None) is None:
                return
            self.demands.end(number)
            self._follow_modes()
            if self._stretches:
                return
            self.core.active = False
            self.patches.undo()
            self.watching.settle()

    def mark(self) -> Mark:
        """Return the current point of the run; :meth:`evidence` returns what was found after it."""
        core = self.core
        counts = (core.saves, core.write_count, core.backwards, core.steps)
        return Mark(len(self.conflicts), len(self.failures), *counts, core.clock, len(self.nonfinite))

    def evidence(self, since: Mark | None = None) -> Evidence:
        """Return all findings since a mark, as plain data."""
        core = self.core
        first, failed, saved, written, backwards, steps, began, nonfinite = since or Mark()
        around: list[tuple[Moment, ...]] = []
        found = tuple(self.conflicts[first:])
        if found:  # moments are only shown around conflicts, and hundreds of them take a while
            self.guard.run(lambda: around.append(moments(self.steps, self.backwards, began, core.clock + 1)))
        return Evidence(
            moments=around[0] if around else (),
            conflicts=found,
            failures=tuple(self.failures[failed:]),
            nonfinite=tuple(self.nonfinite[nonfinite:]),
            seen=Seen(
                saves=core.saves - saved,
                writes=core.write_count - written,
                backwards=core.backwards - backwards,
                steps=core.steps - steps,
                blind_spots=tuple(self.guard.blind_spots.values()),
                copies=self.watching.copies(),
            ),
        )

    def keep(self, collect: Callable[[], Conflict | None]) -> None:
        """Append the conflict that ``collect`` returns, up to ``FINDINGS_KEPT``; an error in it is only noted."""

        def keep() -> None:
            found = collect()
            if found is not None:
                self.conflicts.append(found)

        if len(self.conflicts) < FINDINGS_KEPT:
            self.guard.run(keep)

    def examine(self, error: BaseException) -> Failure | None:
        """Record the Failure behind an exception that has ended the program or left a watched block; return it if new.

        Errors of the version check are Conflicts, and were examined when their backward failed.
        """
        known = len(self.failures)
        self.watching.program_ended_by(error)
        return self.failures[-1] if len(self.failures) > known else None

    def after_fork(self) -> None:
        """Replace the lock in a forked child: another thread of the parent may have held it."""
        self._lock = threading.Lock()

    def let_go(self) -> None:
        """Forget all findings once nobody watches any more: the bound on findings is one stretch's."""
        if not self.is_on:
            self.conflicts.clear()
            self.failures.clear()
            self.nonfinite.clear()

    def _found(self, finding: Conflict | Failure) -> None:
        for on_finding in self.on_findings:
            self.guard.run(partial(on_finding, finding))
        self.demands.on_new(finding)

    def _on_failure(self, entry: RawBackward, error: BaseException) -> None:
        found = self.watching.backward_failed(as_backward(entry), error)
        for explainer in self.explainers:
            self.guard.run(partial(explainer, error, found))


def _watching_for(recorder: Recorder) -> Findings:
    # The detectors import nearly every other package, so they are made on first use.
    from gradsan._watching import Watching

    return Watching(recorder)


_recorder: Recorder | None = None


@contextmanager
def unwatched() -> Iterator[None]:
    """A block of gradsan's own that is not watched: memory read by ``numpy()`` would count as exported."""
    core = recorder().core
    was_active, core.active = core.active, False
    try:
        yield
    finally:
        core.active = was_active


def recorder(native: bool | None = None) -> Recorder:
    """The recorder of this process, made on first use; ``native`` chooses its core while it is off."""
    global _recorder
    if _recorder is None or (native is not None and not _recorder.is_on and _recorder.core.is_native != native):
        _recorder = Recorder(native)
    return _recorder
