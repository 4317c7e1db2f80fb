"""Recorder: switches watching on and off, and keeps what it found. One a process, because torch's hooks are."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from gradsan import _torch
from gradsan._errors import GradsanError
from gradsan.detect.changed_values import ChangedValues
from gradsan.detect.checkpoints import Checkpoints
from gradsan.detect.distributed import BufferSync, Sharded
from gradsan.detect.exports import Exports
from gradsan.detect.functions import Functions
from gradsan.detect.gradient_writes import GradientWrites
from gradsan.detect.graph_growth import UnusedGraphs
from gradsan.detect.hook_writes import HookWrites
from gradsan.detect.hooked import HookedValues
from gradsan.detect.kept_gradients import KeptGradients
from gradsan.detect.life import Life
from gradsan.detect.lost_updates import LostUpdates
from gradsan.detect.memory import Findings, Notes, Uncounted
from gradsan.detect.nonfinite.notice import Notice
from gradsan.detect.nonfinite.search import NonFiniteSearch
from gradsan.detect.prescan import Prescan, way_of
from gradsan.detect.wrapped import Wrapped
from gradsan.errors import failures, warned
from gradsan.graph import conflicts, self_check, stale_slots
from gradsan.model import Conflict, Deviation, Evidence, Failure, Message, Moment, NonFinite, Seen
from gradsan.originals import kept_conflicts
from gradsan.originals.deep import Deep
from gradsan.originals.emptied import Emptied
from gradsan.originals.overwriting import Overwriting
from gradsan.record import _core, compilers, user_hooks, writes
from gradsan.record.backwards import Backwards, moments
from gradsan.record.demands import Asked, Demands, Found
from gradsan.record.guarding import Guard
from gradsan.record.listeners import Listeners
from gradsan.record.patches import Patches
from gradsan.record.steps import Settling, Steps, read_backward

_CONFLICTS_KEPT = 1_000
_SEEN = "_gradsan_seen"
_MET = "_gradsan_met"


class Mark(NamedTuple):
    """How much there was of everything at some point of the run."""

    conflicts: int = 0
    failures: int = 0
    saves: int = 0
    writes: int = 0
    backwards: int = 0
    steps: int = 0
    clock: int = 0
    nonfinite: int = 0


class Recorder:
    """Clock, logs and conflicts of this process."""

    def __init__(self, native: bool | None = None) -> None:
        """Prepare, without touching torch yet. ``native`` as in :func:`gradsan.record._core.make_core`."""
        self.core = _core.make_core(native)
        self.guard = Guard()
        self.listeners = Listeners(self.core, self.guard)
        self.core.on_failure = self._on_failure
        self.steps = Steps(self.core)
        self.demands = Demands()
        self.tellers: tuple[Callable[[Conflict | Failure], None], ...] = ()
        """Who is told of each new finding when it is kept."""
        self.explainers: tuple[Callable[[BaseException, Conflict | Failure | None], None], ...] = ()
        """Who is told of each error that leaves a backward, with what was found of it."""
        self.conflicts: list[Conflict] = Found(self._found)
        self.failures: list[Failure] = Found(self._found)
        self.backwards = Backwards(self.core)
        self.life = Life(self.core, self.backwards, self._on_life)
        self.core.on_round = self._on_round
        self.unused_graphs = UnusedGraphs(self.core, self._on_life, self._await_use)
        self.core.on_quiet = self._on_quiet
        self.emptied = Emptied(self.core, self.steps, self._scan_emptied, self._keep)
        self.deep = Deep(self.core, self._describe, self._keep, self._is_healed, self.emptied, self.guard.note)
        self.overwriting = Overwriting(self.core, self.deep, self.demands, self._keep, self.guard.run_hushed)
        self._deep_patches = Patches()
        self.uncounted = Uncounted(self.core, self._scan_before_backward)
        self.exports = Exports(self.core, self.guard.note, self._listen_to_nodes)
        self.prescan = Prescan(self.core, self.steps, self.uncounted, self.exports, self.conflicts, _CONFLICTS_KEPT)
        self.hooked = HookedValues(self.core, self.steps, self.uncounted, self.exports, self.deep, self._keep)
        notes = Notes(self.core, self.steps, self.uncounted, self.exports)
        self._findings = Findings(self.conflicts, _CONFLICTS_KEPT)
        self.functions = Functions(self.core, self.steps, notes, self._findings, self._scan_functions)
        self.checkpoints = Checkpoints(self.core, self.steps, notes, self._findings, self.guard.note)
        self.changed_values = ChangedValues(self.core, self.steps, self._findings, self.uncounted)
        self.wrapped = Wrapped(self.core, self.steps, self._findings)
        self.buffer_sync = BufferSync(self.core, self.uncounted, self.guard.note)
        self.sharded = Sharded(self.core, self.steps, notes, self._findings)
        # What they hold comes and goes; GS217 tells of what changed, and copies would undo what sharding is for.
        self.deep.leaves_alone = self.sharded.holds
        self.gradient_writes = GradientWrites(self.core, self.failures, _CONFLICTS_KEPT)
        self.hook_writes = HookWrites(self.core, self.uncounted, self.exports, self.prescan, self.guard.run_hushed)
        self.exports.on_hand_out = self._on_hand_out
        self.core.on_write = self._on_write
        self.kept_gradients = KeptGradients(self.core, self.steps, self.backwards, self.uncounted, self._on_life)
        self.lost_updates = LostUpdates(self.core, self.steps, self.uncounted, self._on_life, self._listen_for_updates)
        self.core.on_differentiable = self._on_differentiable
        self._settling = Settling(
            self.core,
            lambda optimizer, frame: self.guard.run(partial(self.life.first_step, optimizer, frame)),
            lambda optimizer: self.guard.run(partial(self.uncounted.stepped, optimizer)),
        )
        self.nonfinite: list[NonFinite] = []
        self._search = NonFiniteSearch(self.core, self.nonfinite.append, self.guard.note)
        self._notice = Notice(self.core, self.steps, self._settling, self.nonfinite.append)
        self._nonfinite_patches = Patches()
        self.problems: list[Message] | None = None
        """What gradsan cannot do on this torch; None as long as nothing was watched."""
        self._patches = Patches()
        self._replacements: list[writes.Replacement] | None = None
        self._stretches: dict[int, str] = {}
        self._is_deep = self._is_searching = False
        self._stretch_numbers = itertools.count(1)
        self._lock = threading.Lock()

    @property
    def is_on(self) -> bool:
        """Whether capture is running."""
        return bool(self._stretches)

    def start(self, mode: str = "watch", asked: Asked | None = None) -> int:
        """Begin a stretch of recording and return its number; of the modes of those that run, the strongest holds.

        ``asked`` is what this stretch wants beyond being told.
        """
        with self._lock:
            number = next(self._stretch_numbers)
            is_first = not self._stretches
            self._stretches[number] = mode
            self.demands.begin(number, mode, asked if asked is not None else Asked())
            if is_first:
                self._start_watching()
            # After the rest, because what was replaced last is put back first.
            self._follow_modes()
        return number

    def _follow_modes(self) -> None:
        """Do what the stretches ask for that run now, and no longer what only others asked for."""
        modes = set(self._stretches.values())
        was_deep, was_searching = self._is_deep, self._is_searching
        self._is_deep, self._is_searching = bool(modes & {"deep", "heal"}), "nonfinite" in modes
        if self._is_deep:  # what was saved under heal mode is healed after it has ended, too
            self.deep.mode = "heal" if "heal" in modes else "deep"
        if self._is_deep and not was_deep:
            self._look_always(True)
            self.guard.install(self._keep_originals)
        elif was_deep and not self._is_deep:
            self._look_always(False)
            self._deep_patches.undo()
        if self._is_searching and not was_searching:
            self.guard.install(self._watch_values)
        elif was_searching and not self._is_searching:
            self._stop_nonfinite()
        self._listen_for_halts()
        self.overwriting.follow(self._is_deep)

    def _start_watching(self) -> None:
        # A stretch of watching tells what it could not see itself.
        self.guard.blind_spots.clear()
        is_first = self.problems is None
        if is_first:
            self.problems = self_check.before_watching()
        self.core.active = True
        self.prescan.forget()
        self._findings.forget()
        self.gradient_writes.forget()
        self.unused_graphs.forget()
        self.lost_updates.forget()
        self.life.forget()
        self._notice.forget()
        self.listeners.call_before_backward(self._notice.before_backward)
        self.listeners.follow()
        for part in (
            self._watch_user_hooks,
            self._watch_operations,
            self._watch_steps,
            self._watch_warnings,
            self._watch_doors,
            self._watch_functions,
            self._watch_parallel,
            self._watch_compilers,
        ):
            self.guard.install(part)
        if is_first and self.problems is not None:
            self.problems += self_check.while_watching()
        for problem in self.problems or ():
            self.guard.note(problem)

    def _watch_values(self) -> None:
        # The search says more of the same.
        self._notice.leave()
        self._search.start(self._nonfinite_patches, self.guard.run)
        self._listen_for_values(True)

    def _listen_for_values(self, wanted: bool) -> None:
        self.listeners.call_before_backward(self._search.before_backward, wanted)
        self.listeners.call_after_backward(self._search.after_backward, wanted)

    def _stop_nonfinite(self) -> None:
        self._listen_for_values(False)
        self.guard.run(self._search.settle)
        self._nonfinite_patches.undo()

    def _keep_originals(self) -> None:
        self.deep.start(self._deep_patches)

    def _look_always(self, wanted: bool) -> None:
        for listener in (self.deep.before_backward, self.changed_values.before_backward):
            self.listeners.call_before_backward(listener, wanted)
        self.changed_values.looks_always = self.checkpoints.compares_values = wanted
        self.core.before_write = self._before_write if wanted else None

    def _before_write(self, target: Any) -> None:
        self.guard.run_hushed(partial(self.uncounted.snapshots.before_write, target))

    def _describe(
        self,
        kept: Any,
        counted: bool,
        raised: bool,
        changed: bool,
        deviation: Deviation | None,
        healed: int | None,
        node: Any = None,
    ) -> Conflict:
        beside = kept_conflicts.changed_beside(self.steps.current_backward(), kept) if raised and not changed else None
        if beside is not None:
            (node, kept), changed, deviation = beside, True, None
        return kept_conflicts.of_kept(
            self.core,
            self.steps,
            kept,
            counted=counted,
            raised=raised,
            changed=changed,
            deviation=deviation,
            healed=healed,
            door=self.emptied.door(kept.alias, kept.clock)
            or way_of(self.uncounted, self.exports, kept.changed_part or kept),
            node=node,
        )

    def _is_healed(self, describe: Callable[[], Conflict]) -> bool:
        heals = self.demands.heals
        if heals is None:
            return True
        answer: list[bool] = []
        self.guard.run(lambda: answer.append(heals(describe())))
        return answer == [True]

    def _listen_for_halts(self) -> None:
        self.listeners.call_before_backward(self.demands.before_backward, bool(self.demands.stop))

    def _scan_before_backward(self) -> None:
        """Have graphs looked through from now on: something can be written past the version counter."""
        self.listeners.call_before_backward(self.prescan.before_backward)

    def _scan_emptied(self) -> None:
        """Have graphs looked through from now on: memory has been taken away from under a storage."""
        self.listeners.call_before_backward(self.emptied.before_backward)

    def _scan_functions(self) -> None:
        """Have custom Functions looked at from now on: one has kept or written something."""
        self.listeners.call_before_backward(self.functions.before_backward)

    def _listen_to_nodes(self, wanted: bool) -> None:
        """Have what is saved in exported memory copied, or no longer."""
        if wanted:
            self._scan_before_backward()
        self.listeners.call_after_nodes(self.exports.after_nodes, wanted)

    def _on_round(self, entry: Any, rounds: int) -> None:
        for part in (self.life, self.changed_values, self.kept_gradients, self.wrapped, self.lost_updates):
            self.guard.run(partial(part.before_round, entry, rounds))
        # In deep mode what a Node is given is compared, whoever wrote.
        if not self._is_deep:
            self.guard.run_hushed(partial(self.hook_writes.before_round, entry, rounds))

    def _on_hand_out(self, storage: int) -> None:
        if not self._is_deep:
            self.guard.run_hushed(partial(self.hook_writes.handed_out, storage))

    def _on_differentiable(self, entry: Any, inputs: Any, result: Any) -> None:
        self.guard.run(partial(self.lost_updates.differentiable, entry, inputs, result))

    def _listen_for_updates(self, wanted: bool) -> None:
        self.listeners.call_before_backward(self.lost_updates.before_backward, wanted)

    def _on_quiet(self, end: int) -> None:
        self.guard.run(partial(self.unused_graphs.look, end))

    def _await_use(self) -> None:
        """Have the next backward looked at: containers keep graphs that none has used so far."""
        self.listeners.call_before_backward(self.unused_graphs.before_backward)

    def _on_write(self, tensor: Any, op: str, stack: Any) -> None:
        if self.core.running:
            self.guard.run_hushed(lambda: self.gradient_writes.on_write(tensor, op, stack))
            if not self._is_deep:
                self.guard.run_hushed(lambda: self.hook_writes.on_write(tensor, op, stack))
        self.overwriting.written(tensor)

    def _watch_user_hooks(self) -> None:
        user_hooks.watch_user_hooks(self.core, self._patches, self.hooked, self.guard.run_hushed)

    def _watch_operations(self) -> None:
        if self._replacements is None:
            self._replacements = writes.plan(self.core)
        writes.install(self.core, self._patches, self._replacements)

    def _watch_warnings(self) -> None:
        warned.watch(self._patches, self._on_warning)

    def _on_warning(self, message: Any, category: type[Warning]) -> None:
        self.guard.run(partial(self._keep_warning, message, category))

    def _keep_warning(self, message: Any, category: type[Warning]) -> None:
        failure = warned.of_warning(self, message, category) if len(self.failures) < _CONFLICTS_KEPT else None
        if failure is not None:
            self.failures.append(failure)

    def _on_life(self, failure: Failure) -> None:
        if len(self.failures) < _CONFLICTS_KEPT:
            self.failures.append(failure)

    def _watch_doors(self) -> None:
        self.uncounted.install(self._patches, self.guard.run_hushed)
        self.exports.install(self._patches, self.guard.run_hushed)
        self.emptied.install(self._patches, self.guard.run_hushed)

    def _watch_functions(self) -> None:
        self.functions.install(self._patches, self.guard.run)
        self.checkpoints.install(self._patches, self.guard.run)

    def _watch_parallel(self) -> None:
        self.sharded.install(self._patches, self.guard.run_hushed)
        self.buffer_sync.install(self._patches, self.guard.run_hushed)

    def _watch_compilers(self) -> None:
        compilers.install(self._patches, self.guard.run_hushed)

    def _watch_steps(self) -> None:
        self.steps.install(self._patches)

    def stop(self, number: int) -> None:
        """End the stretch of that number, in whatever order; the last one takes every hook and patch out again."""
        with self._lock:
            if self._stretches.pop(number, None) is None:
                return
            self.demands.end(number)
            self._follow_modes()
            if self._stretches:
                return
            self.core.active = False
            self._patches.undo()
            self.guard.run(self.unused_graphs.settle)
            self.guard.run(self.lost_updates.settle)
            self.guard.run(self.life.settle)
            self.guard.run(self._notice.settle)

    def mark(self) -> Mark:
        """A point in the run; :meth:`evidence` tells what came after it."""
        core = self.core
        counts = (core.saves, core.write_count, core.backwards, core.steps)
        return Mark(len(self.conflicts), len(self.failures), *counts, core.clock, len(self.nonfinite))

    def evidence(self, since: Mark | None = None) -> Evidence:
        """What was found since a mark, as plain data."""
        core = self.core
        first, failed, saved, written, backwards, steps, began, nonfinite = since or Mark()
        around: list[tuple[Moment, ...]] = []
        found = tuple(self.conflicts[first:])
        if found:  # moments are only told around conflicts, and hundreds of them take a while
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
            ),
        )

    def _found(self, finding: Conflict | Failure) -> None:
        for teller in self.tellers:
            self.guard.run(partial(teller, finding))
        self.demands.met(finding)

    def after_fork(self) -> None:
        """This process is a forked child: a lock that another thread of its parent's held is free."""
        self._lock = threading.Lock()

    def let_go(self) -> None:
        """Forget what was found, where nobody watches any more: the bound on findings is one stretch's."""
        if not self.is_on:
            self.conflicts.clear()
            self.failures.clear()
            self.nonfinite.clear()

    def _on_failure(self, entry: Any, error: BaseException) -> None:
        """A backward has ended with an exception; find out what lies behind it while graph and variables are there."""
        known = len(self.conflicts)
        self._find_cause(entry, error)
        if self._is_searching:
            self.guard.run_hushed(partial(self._search.failed, entry, error))
        if self.explainers:
            found = self.conflicts[-1] if len(self.conflicts) > known else failures.kept_on(error)
            for explainer in self.explainers:
                self.guard.run(partial(explainer, error, found))

    def _find_cause(self, entry: Any, error: BaseException) -> None:
        if getattr(error, _SEEN, False) or isinstance(error, GradsanError):
            return
        if not stale_slots.is_version_error(error):
            self.guard.run_hushed(partial(self._look_at, error, entry))
            return
        if _torch.is_building_graph(error):
            return
        # One failure passes several engine calls where a backward runs inside another (checkpointing).
        with contextlib.suppress(AttributeError):
            setattr(error, _SEEN, True)
        backward = read_backward(entry)
        with _torch.hushed():
            self._keep(
                lambda: self.checkpoints.kept(
                    conflicts.of_failure(self.core, self.steps, backward, error, None, self.backwards), error
                )
            )

    def _look_at(self, error: BaseException, entry: Any) -> None:
        backward = read_backward(entry)
        inputs = _torch.engine_inputs(error, backward.outputs)
        failure = failures.of_exception(
            self.core, self.steps, error, backwards=self.backwards, backward=backward, inputs=inputs
        )
        if failure is not None:
            failures.keep_on(error, failure)

    def meet(self, error: BaseException) -> Failure | None:
        """An exception has ended the program, or has left a watched block; remember the Failure that it is, if any.

        The version check's own errors are Conflicts, and were met when their backward failed. Returns what is new.
        """
        known = len(self.failures)
        if known < _CONFLICTS_KEPT:
            self.guard.run(partial(self._meet, error))
        if self._is_searching and isinstance(error, Exception):
            self.guard.run_hushed(partial(self._search.meet, error))
        return self.failures[-1] if len(self.failures) > known else None

    def _meet(self, error: BaseException) -> None:
        # A number, because the program may send its exceptions to other processes.
        if getattr(error, _MET, None) == id(self):
            return
        looked_at: BaseException | None = error
        while looked_at is not None and not stale_slots.is_version_error(looked_at):
            failure = failures.of_exception(self.core, self.steps, looked_at, backwards=self.backwards)
            if failure is not None:
                self.failures.append(failure)
                with contextlib.suppress(AttributeError, TypeError):
                    setattr(error, _MET, id(self))
                return
            # ``raise TrainingFailed(...) from error``
            looked_at = looked_at.__cause__

    def _keep(self, collect: Callable[[], Conflict | None]) -> None:
        def keep() -> None:
            found = collect()
            if found is not None:
                self.conflicts.append(found)

        if len(self.conflicts) < _CONFLICTS_KEPT:
            self.guard.run(keep)


_recorder: Recorder | None = None


def recorder(native: bool | None = None) -> Recorder:
    """The recorder of this process, made on first use; ``native`` chooses its core while it is off."""
    global _recorder
    if _recorder is None or (native is not None and not _recorder.is_on and _recorder.core.is_native != native):
        _recorder = Recorder(native)
    return _recorder
