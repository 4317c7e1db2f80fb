"""Watching: every detector, wired to the recorder of this process, and the evidence of a backward that failed.

The recorder knows no detector: it reports when watching begins and ends, in which modes, and the program's final error.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from gradsan.detect.changed_values import ChangedValues
from gradsan.detect.checkpoints import Checkpoints
from gradsan.detect.distributed import BufferSync, Collectives, Sharded
from gradsan.detect.exports import Exports
from gradsan.detect.functions import Functions
from gradsan.detect.gradients.gradient_writes import GradientWrites
from gradsan.detect.gradients.kept_gradients import KeptGradients
from gradsan.detect.gradients.lost_updates import LostUpdates
from gradsan.detect.gradients.missing_gradients import MissingGradients
from gradsan.detect.gradients.spent_gradients import SpentGradients
from gradsan.detect.graphs.growing_graphs import GrowingGraphs
from gradsan.detect.graphs.unused_graphs import UnusedGraphs
from gradsan.detect.hook_writes import HookWrites
from gradsan.detect.hooked import HookedValues
from gradsan.detect.meaning.changed_again import ChangedAgain
from gradsan.detect.meaning.idle_schedules import IdleSchedules
from gradsan.detect.meaning.lost_hooks import LostHooks
from gradsan.detect.meaning.made import Making
from gradsan.detect.meaning.reused_inputs import ReusedInputs
from gradsan.detect.meaning.stale_values import StaleValues
from gradsan.detect.meaning.stopped_gradients import StoppedGradients
from gradsan.detect.meaning.terms.constant_penalties import ConstantPenalties, DataReads
from gradsan.detect.meaning.terms.constant_terms import ConstantTerms
from gradsan.detect.meaning.terms.cut_terms import CutTerms
from gradsan.detect.meaning.terms.drawn_samples import DrawnSamples
from gradsan.detect.meaning.terms.lost_terms import LostTerms
from gradsan.detect.meaning.terms.number_terms import NumberTerms
from gradsan.detect.meaning.terms.written_values import WrittenValues
from gradsan.detect.meaning.unowned import Unowned
from gradsan.detect.meaning.unrecorded_reads import ChangedLosses, UnrecordedReads
from gradsan.detect.memory import Uncounted
from gradsan.detect.nonfinite.notice import Notice
from gradsan.detect.one_tensor.kept_references import KeptReferences
from gradsan.detect.one_tensor.kept_states import KeptStates
from gradsan.detect.one_tensor.own_operands import OwnOperands
from gradsan.detect.one_tensor.second_names import SecondNames
from gradsan.detect.one_tensor.windows import Windows
from gradsan.detect.prescan import Prescan, bypass_of
from gradsan.detect.wrapped import Wrapped
from gradsan.errors.watched import WatchedErrors
from gradsan.graph import self_check, variables, walk
from gradsan.model import Conflict, Copies, Deviation, Failure, Message
from gradsan.originals import kept_conflicts
from gradsan.originals.deep import Deep
from gradsan.originals.emptied import Emptied
from gradsan.record import compilers, user_hooks
from gradsan.record.detector import Detector, KnownConflicts, Run, overriding
from gradsan.record.patches import Patches
from gradsan.record.recorder import Recorder
from gradsan.record.steps import RawBackward, Settling, as_backward, read_backward

if TYPE_CHECKING:
    from gradsan.detect.compiled_inputs import CompiledInputs
    from gradsan.detect.meaning.changed_arrays import ChangedArrays
    from gradsan.detect.nonfinite.search import NonFiniteSearch
    from gradsan.detect.one_tensor.arrays_in_lists import ArraysInLists
    from gradsan.originals.overwriting import Overwriting


DETECTORS: tuple[type[Detector], ...] = (
    Uncounted,
    Exports,
    Emptied,
    Functions,
    Checkpoints,
    Sharded,
    BufferSync,
    Collectives,
    Prescan,
    GradientWrites,
    GrowingGraphs,
    MissingGradients,
    ChangedValues,
    KeptGradients,
    Wrapped,
    LostUpdates,
    LostHooks,
    ChangedLosses,
    ReusedInputs,
    SecondNames,
    OwnOperands,
    KeptReferences,
    KeptStates,
    StaleValues,
    StoppedGradients,
    ChangedAgain,
    ConstantTerms,
    Making,
    ConstantPenalties,
    DataReads,
    DrawnSamples,
    CutTerms,
    NumberTerms,
    WrittenValues,
    UnrecordedReads,
    Windows,
    SpentGradients,
    IdleSchedules,
    Unowned,
    LostTerms,
    UnusedGraphs,
    HookWrites,
    Notice,
)
"""In the order in which their patches are put in, and in which they are called before a backward."""


class _SharedReading:
    """A block in which graphs are walked, and variables searched, once for all detectors."""

    def __enter__(self) -> None:
        walk.SHARED.__enter__()
        variables.SHARED.__enter__()

    def __exit__(self, *raised: object) -> None:
        variables.SHARED.__exit__(*raised)
        walk.SHARED.__exit__(*raised)


_SHARED_READING = _SharedReading()


class Watching:
    """The detectors of one recorder."""

    def __init__(self, recorder: Recorder) -> None:
        """Make the detectors; torch is not touched yet."""
        self._recorder = recorder
        core, guard = recorder.core, recorder.guard
        self._listeners = recorder.listeners
        self._listeners.around = _SHARED_READING
        self.run = run = Run(recorder)
        self._settling = run.settling = Settling(
            core,
            lambda optimizer, frame: guard.run(partial(run.get(MissingGradients).first_step, optimizer, frame)),
            lambda optimizer, frame: guard.run(partial(run.get(MissingGradients).later_step, optimizer, frame)),
            lambda optimizer: guard.run(partial(run.get(Uncounted).stepped, optimizer)),
        )
        self._settling.on_first = self._on_first_step
        self._settling.on_later = self._on_later_step
        # What sharded groups hold comes and goes; GS217 reports what changed, and copies would undo what it is for.
        self.deep = run.put(
            Deep(
                core,
                self._describe,
                recorder.keep,
                self._is_healed,
                run.get(Emptied),
                guard.note,
                left_alone=run.get(Sharded),
            )
        )
        self.overwriting: Overwriting | None = None
        self.detectors = tuple(run.get(kind) for kind in DETECTORS)
        self.uncounted, self.exports, self.emptied = run.get(Uncounted), run.get(Exports), run.get(Emptied)
        self.changed_values, self.hook_writes = run.get(ChangedValues), run.get(HookWrites)
        self.notice, self._checkpoints = run.get(Notice), run.get(Checkpoints)
        self._errors = WatchedErrors(recorder, self._checkpoints, run.report)
        self._before_rounds = tuple(
            one for one in overriding(self.detectors, "before_round") if one is not self.hook_writes
        )
        self._deep_patches, self._nonfinite_patches = Patches(), Patches()
        self._is_deep = self._is_searching = False
        self.problems: list[Message] | None = None
        """Problems of gradsan with this torch; None as long as nothing was watched."""
        core.on_round, core.on_quiet, core.on_write = self._on_round, self._on_quiet, self._on_write
        core.on_differentiable, core.on_gradients = self._on_differentiable, self._on_gradients
        self.exports.on_hand_out, self.exports.on_lent = self._on_hand_out, self._on_lent
        self._of_arrays: tuple[ChangedArrays, ArraysInLists] | None = None

    @cached_property
    def _compiled_inputs(self) -> CompiledInputs:
        from gradsan.detect.compiled_inputs import CompiledInputs

        return CompiledInputs(self.run)

    @cached_property
    def _search(self) -> NonFiniteSearch:
        from gradsan.detect.nonfinite.search import NonFiniteSearch

        compilers.leave_own_frames()
        return NonFiniteSearch(self._recorder.core, self._recorder.nonfinite.append, self._recorder.guard.note)

    def begin(self, install: Callable[[], None]) -> None:
        """Begin watching: ``install`` puts the recorder's own patches into torch, before those of the detectors."""
        recorder, guard = self._recorder, self._recorder.guard
        is_first = self.problems is None
        if is_first:
            self.problems = self_check.before_watching()
        recorder.core.active = True
        self.run.get(KnownConflicts).forget()
        self._of_arrays = None
        for one in overriding(self.detectors, "forget"):
            one.forget()
        self._listeners.follow()
        guard.install("user hooks", self._watch_user_hooks)
        install()
        guard.install("warnings", partial(self._errors.install, recorder.patches))
        for one in overriding(self.detectors, "install"):
            run = guard.run_hushed if one.is_hushed else guard.run
            guard.install(one.part, partial(one.install, recorder.patches, run))
        compilers.TRACED.on_first = self._scan_compiled
        compilers.TRACED.publish()
        guard.install("compilers", partial(compilers.install, recorder.patches, guard.run_hushed))
        if is_first and self.problems is not None:
            self.problems += self_check.while_watching()
        for problem in self.problems or ():
            guard.note(problem)

    def follow(self, modes: Collection[str]) -> None:
        """Switch on the modes of the running stretches, and switch off all others."""
        guard = self._recorder.guard
        was_deep, was_searching = self._is_deep, self._is_searching
        self._is_deep, self._is_searching = "deep" in modes or "heal" in modes, "nonfinite" in modes
        self.exports.compares_always = self._is_deep
        if self._is_deep:  # values saved under heal mode are healed after it has ended, too
            self.deep.mode = "heal" if "heal" in modes else "deep"
        if self._is_deep and not was_deep:
            self._look_always(True)
            guard.install("keep originals", partial(self.deep.start, self._deep_patches))
        elif was_deep and not self._is_deep:
            self._look_always(False)
            self._deep_patches.undo()
        if self._is_searching and not was_searching:
            guard.install("values", self._watch_values)
        elif was_searching and not self._is_searching:
            self._stop_nonfinite()
        if self._is_deep and self.overwriting is None:
            from gradsan.originals.overwriting import Overwriting

            demands, keep = self._recorder.demands, self._recorder.keep
            self.overwriting = Overwriting(self._recorder.core, self.deep, demands, keep, guard.run_hushed)
        if self.overwriting is not None:
            self.overwriting.follow(self._is_deep)

    def settle(self) -> None:
        """End watching; the patches have been undone already."""
        for one in overriding(self.detectors, "settle"):
            self._recorder.guard.run(one.settle)

    def copies(self) -> tuple[Copies, ...]:
        """Return the memory that copies of saved values took, by device."""
        return self.deep.copies.most() if self.deep.copies is not None else ()

    def _watch_user_hooks(self) -> None:
        recorder = self._recorder
        hooked = self.run.get(HookedValues)
        user_hooks.watch_user_hooks(recorder.core, recorder.patches, hooked, recorder.guard.run_hushed)

    def _watch_values(self) -> None:
        # The search reports the same, and more.
        self.notice.leave()
        self._search.start(self._nonfinite_patches, self._recorder.guard.run)
        self._listen_for_values(True)

    def _listen_for_values(self, wanted: bool) -> None:
        self._listeners.call_before_backward(self._search.before_backward, wanted)
        self._listeners.call_after_backward(self._search.after_backward, wanted)

    def _stop_nonfinite(self) -> None:
        self._listen_for_values(False)
        self._recorder.guard.run(self._search.settle)
        self._nonfinite_patches.undo()

    def _look_always(self, wanted: bool) -> None:
        for listener in (self.deep.before_backward, self.changed_values.before_backward):
            self._listeners.call_before_backward(listener, wanted)
        self.changed_values.looks_always = self._checkpoints.compares_values = wanted
        self.uncounted.copy_written("deep", wanted)

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
        steps = self._recorder.steps
        beside = kept_conflicts.changed_beside(steps.current_backward(), kept) if raised and not changed else None
        if beside is not None:
            (node, kept), changed, deviation = beside, True, None
        return kept_conflicts.of_kept(
            self._recorder.core,
            steps,
            kept,
            counted=counted,
            raised=raised,
            changed=changed,
            deviation=deviation,
            healed=healed,
            bypass=self.emptied.bypass(kept.alias, kept.clock)
            or bypass_of(self.uncounted, self.exports, kept.changed_part or kept),
            node=node,
        )

    def _is_healed(self, describe: Callable[[], Conflict]) -> bool:
        heals = self._recorder.demands.heals
        if heals is None:
            return True
        answer: list[bool] = []
        self._recorder.guard.run(lambda: answer.append(heals(describe())))
        return answer == [True]

    def _scan_compiled(self) -> None:
        """Scan graphs before each backward from now on: something was compiled."""
        self._listeners.call_before_backward(self._compiled_inputs.before_backward)

    def _on_round(self, entry: Any, rounds: int) -> None:
        if self._listeners.is_traced(entry):
            return
        guard, backward = self._recorder.guard, as_backward(entry)
        guard.run(self._settling.look_again)
        with _SHARED_READING:
            for one in self._before_rounds:
                guard.run(partial(one.before_round, backward, rounds))
            # Deep mode compares the values that a Node gets, whoever wrote.
            if not self._is_deep:
                guard.run_hushed(partial(self.hook_writes.before_round, backward, rounds))

    def _on_first_step(self, optimizer: Any) -> None:
        guard = self._recorder.guard
        guard.run(partial(self.run.get(StoppedGradients).first_step, optimizer))
        guard.run(partial(self.run.get(SecondNames).first_step, optimizer))
        guard.run(partial(self.run.get(KeptReferences).first_step, optimizer))
        guard.run(partial(self.run.get(SpentGradients).first_step, optimizer))
        guard.run(partial(self.run.get(KeptGradients).stepped, optimizer))

    def _on_later_step(self, optimizer: Any) -> None:
        guard = self._recorder.guard
        guard.run(partial(self.run.get(SpentGradients).later_step, optimizer))
        guard.run(partial(self.run.get(KeptGradients).stepped, optimizer))

    def _on_lent(self, array: Any, tensor: Any, stack: Any) -> None:
        self.run.get(CutTerms).imported(array, tensor)
        if self._of_arrays is None:
            from gradsan.detect.meaning.changed_arrays import ChangedArrays
            from gradsan.detect.one_tensor.arrays_in_lists import ArraysInLists

            self._of_arrays = ChangedArrays(self.run), ArraysInLists(self.run)
        for one in self._of_arrays:
            one.lent(array, tensor, stack)

    def _on_hand_out(self, storage: int) -> None:
        if not self._is_deep:
            self._recorder.guard.run_hushed(partial(self.hook_writes.handed_out, storage))

    def _on_differentiable(self, entry: Any, inputs: Any, result: Any) -> None:
        self._recorder.guard.run(partial(self._recorder.steps.made_by_engine.note, entry, result))
        self._recorder.guard.run(partial(self.run.get(LostUpdates).differentiable, as_backward(entry), inputs, result))
        self._recorder.guard.run_hushed(partial(self.run.get(Unowned).asked, inputs))

    def _on_gradients(self, entry: Any, inputs: Any, result: Any) -> None:
        self._recorder.guard.run(partial(self.run.get(ConstantTerms).gradients, as_backward(entry), inputs, result))
        self._recorder.guard.run_hushed(partial(self.run.get(Unowned).asked, inputs))

    def _on_quiet(self, end: int) -> None:
        self._recorder.guard.run(partial(self.run.get(UnusedGraphs).look, end))

    def _on_write(self, tensor: Any, op: str, stack: Any) -> None:
        guard = self._recorder.guard
        if self._recorder.core.running:
            guard.run_hushed(lambda: self.run.get(GradientWrites).on_write(tensor, op, stack))
            if not self._is_deep:
                guard.run_hushed(lambda: self.hook_writes.on_write(tensor, op, stack))
        if self.overwriting is not None:
            self.overwriting.written(tensor)

    def backward_failed(self, entry: RawBackward, error: BaseException) -> Conflict | Failure | None:
        """Find the cause of an exception that ended a backward while its graph and variables exist; None if unknown."""
        found = self._errors.backward_failed(read_backward(entry), error)
        if self._is_searching:
            self._recorder.guard.run_hushed(partial(self._search.failed, entry, error))
        return found

    def program_ended_by(self, error: BaseException) -> None:
        """Keep the Failure behind an exception that has ended the program or left a watched block, if there is one."""
        self._errors.program_ended_by(error)
        if self._is_searching and isinstance(error, Exception):
            self._recorder.guard.run_hushed(partial(self._search.examine, error))


def watching_of(recorder: Recorder) -> Watching:
    """Return the detectors of ``recorder``."""
    assert isinstance(recorder.watching, Watching)
    return recorder.watching
