"""Verdict on a trial of a candidate: whether it helped, and how the training differs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from gradsan import source
from gradsan.model import Diagnosis, Fix, Message, Verification
from gradsan.present._places import shown_path
from gradsan.repair.compare import Comparison, compare, tolerance
from gradsan.repair.finite import finite_parts
from gradsan.repair.patch import Patch
from gradsan.repair.training import Training, compare_trainings
from gradsan.repair.trials.trial import Recording, Trial

_LONGEST = 200
"""Characters of an exception's message that a verdict quotes."""

_KEEPS_VALUES = frozenset(
    {
        *("out_of_place", "clone_before_mutation", "list_and_stack", "index_base_instead"),
        *("disable_inplace_module", "copy_on_context", "reorder_update", "record_the_change", "scale_out_of_place"),
        "recompute_forward",
    }
)
"""Kinds after which the first forward computes the same: no write is lost, and no later write is read."""

MEANT = frozenset(
    {
        *("help.loss_recorded", "help.value_recorded", "help.layer_out_of_place", "help.recompute_perturbed"),
        *("help.sum_before_update", "help.parameter_unrecorded"),
    }
)
"""Messages of kinds that keep values elsewhere: a write past the graph is meant to count, a residual to stay."""

TWICE = "fix.computes_twice"
"""Message of a candidate that calls modules again with the same arguments."""

APART = "help.written_apart_how"
"""How the training changes where the write went to memory that several elements shared: nothing defined was lost."""
FROM_KEPT = "fix.recompute_from_kept"
"""Message of a candidate that computes a kept value again: an earlier round has computed it from the same arguments."""

Say = Callable[[Message], str]


@dataclass(frozen=True, slots=True)
class Judge:
    """The reference that candidates are compared with.

    ``reference`` is the healed original; ``is_replayable`` says that two runs of the program compute the same, without
    which no difference is meaningful; ``noise`` names what differs between two runs regardless (times). ``say`` renders
    a Message in the words of the report, paths are shown relative to ``cwd``. ``is_of_values``: the fault is NaN or
    Inf, so only values finite before can be compared. ``unrecorded`` is the message for a change that leaves a write
    that bypasses autograd, or a gradient that the loss reads, without a graph, which may have been meant to have one:
    the correct gradients are unknown. ``so_far`` is the patch for the faults before this one. ``spared`` is the message
    for a change after which the fault's write no longer reaches its caller's tensor; None where that loses a write.
    ``others`` are the silent findings of the reference beside this fault, which no candidate for it is to mend.
    """

    reference: Trial
    is_replayable: bool
    say: Say
    cwd: Path | None
    noise: frozenset[str] = frozenset()
    is_of_values: bool = False
    unrecorded: Message | None = None
    so_far: Patch = field(default_factory=Patch)
    spared: Message | None = None
    others: tuple[Diagnosis, ...] = ()

    def tried(self, fix: Fix, patch: Patch, trial: Trial, before: Trial) -> Tried:
        """The candidate ``fix`` with the results of its ``trial``; ``before`` is the program's trial without it."""
        reference, candidate, has_numbers = self._compared(trial)
        comparison = compare(reference, candidate)
        training = self.training(trial)
        if comparison.is_equal and comparison.difference and training.parameters and fix.kind.startswith("detach_"):
            # A graph cut off may have given little, and Adam makes a step as long as any other of it.
            comparison = replace(comparison, is_equal=False)
        runs = trial.recording.finished and not faults_of(trial)
        went_further = not trial.timed_out and self._went_further(trial, before, patch)
        is_known = comparison.has_reference and self.is_replayable and has_numbers
        # What the reference is told of, too, is another fault. Where healing may change its gradients, they must agree.
        is_healed = any(one.events for one in faults_of(trial))
        leaves = is_known and (comparison.is_equal or not is_healed) and self._leaves_others(trial, patch)
        # A run that ends with another, silent finding may still have lost gradients.
        ran = runs or leaves
        is_over = ran or (trial.recording.finished and comparison.lost)
        loss = _loss(comparison, training, fix) if is_over else None
        keeps_values = is_known and fix.kind in _KEEPS_VALUES and fix.summary.key not in MEANT
        is_another = ran and keeps_values and begins_with_another_loss(reference, trial.recording)
        if is_another and self.spared is None:
            is_shared = self.unrecorded is not None and self.unrecorded.key == APART
            another = "fix.another_value" if fix.kind == "recompute_forward" else "fix.another_loss"
            loss = loss or Message("fix.still_shared" if is_shared else another)
        goes_as_far = not runs and self._ends_as_the_reference(comparison, training, trial, patch)
        if ran and loss is None and reference.finished and candidate.unused > reference.unused:
            loss = Message("fix.unused_backwards", {"count": candidate.unused - reference.unused})
        passed = (ran or goes_as_far) and loss is None
        detail = loss or self._detail(trial, patch, runs, went_further)
        if leaves and loss is None:
            detail = Message("fix.another_fault", {"what": self._failure(trial, patch)})
        if goes_as_far:
            detail = Message("fix.another_failure", {"what": self._failure(trial, patch)})
        verdict = _verdict(comparison, training, passed, is_known)
        if self.unrecorded is not None and verdict in ("same", "gradients"):
            fix, verdict, is_known = replace(fix, how_changed=self.unrecorded), None, False
        verification = Verification(
            status="passed" if passed else "failed",
            detail=self.say(detail),
            gradient_difference=comparison.difference if is_known else None,
            training=verdict,
            differs_in=_differs_in(verdict, comparison, training),
        )
        tested = replace(fix, diff=patch.diff(self.cwd), lines=(), applicability="review", verification=verification)
        if verdict == "same":
            how = Message("fix.finite_same") if self.is_of_values else None
            tested = replace(tested, meaning="preserved", how_changed=how, applicability="automatic")
        elif verdict == "gradients":
            how = Message("fix.same_gradients", {"names": ", ".join(verification.differs_in)})
            tested = replace(tested, meaning="preserved", how_changed=how)
        elif passed and is_known and comparison.left_differs:
            tested = replace(tested, meaning="changed", how_changed=Message("fix.left_gradients_differ"))
        elif goes_as_far:
            tested = replace(tested, meaning="changed", how_changed=Message("fix.same_up_to_there"))
        elif passed:
            how = fix.how_changed or (self.spared if is_another else None) or self._how_changed(comparison)
            if self.is_of_values and not has_numbers and self.is_replayable:
                how = Message("fix.with_nothing_finite", {"how": how})
            if (
                fix.kind == "recompute_forward"
                and fix.summary.key != FROM_KEPT
                and _repeats(self.reference.recording, trial.recording)
            ):
                how = Message(TWICE, {"how": how})
            tested = replace(tested, meaning="changed", how_changed=how)
        else:
            # No suggestion has been measured to its end.
            tested = replace(tested, meaning="changed", how_changed=Message("fix.not_measured"))
        return Tried(tested, patch, trial, passed, went_further and loss is None)

    def training(self, trial: Trial) -> Training:
        """The differences between the training of ``trial`` and the original's, without those due to chance."""
        reference, candidate, _ = self._compared(trial)
        texts = () if self.is_of_values else (self.reference.all_texts, trial.all_texts)
        return compare_trainings(reference, candidate, *texts).without(self.noise)

    def _compared(self, trial: Trial) -> tuple[Recording, Recording, bool]:
        """The recordings of the original and of ``trial``, and whether there is anything to compare."""
        if not self.is_of_values:
            return self.reference.recording, trial.recording, True
        parts = finite_parts(self.reference.recording, trial.recording)
        return parts.reference, parts.candidate, parts.has_numbers

    def _went_further(self, trial: Trial, before: Trial, patch: Patch) -> bool:
        if self.is_of_values:
            return _is_born_later(trial, before, patch, self.so_far)
        return _progress(trial) > _progress(before) or _has_another_fault(trial, before, patch, self.so_far)

    def _leaves_others(self, trial: Trial, patch: Patch) -> bool:
        """Whether the trial ran to its end, and every finding in it is one of ``others``."""
        left = faults_of(trial)
        if not (left and trial.recording.finished) or self.is_of_values:
            return False
        return all(any(is_same_finding(one, patch, other, Patch()) for other in self.others) for one in left)

    def _ends_as_the_reference(self, comparison: Comparison, training: Training, trial: Trial, patch: Patch) -> bool:
        """Whether the healed original ends with the same error, which is another fault, after an equal training."""
        mine, other = trial.failed_by or trial.recording.exception, self.reference.failed_by
        right = other or self.reference.recording.exception
        if mine is None or mine != right or faults_of(trial) or trial.failed_at is None or not self.is_replayable:
            return False
        place, there = trial.failed_at, self.reference.failed_at
        is_same_place = there is not None and (place[0], patch.line_before(*place)[0]) == there
        is_alike = comparison.is_alike and not comparison.lost and not (training.differs_in or training.overwritten)
        return is_same_place and is_alike and len(self.reference.recording.losses) == len(trial.recording.losses)

    def is_in_doubt(self, trial: Trial) -> bool:
        """Whether gradients are equal and something else differs, which may be chance: a time, an address."""
        if not (self.is_replayable and trial.recording.finished) or faults_of(trial):
            return False
        training = self.training(trial)
        has_differences = bool(training.differs_in) and not training.drawn
        return has_differences and compare(*self._compared(trial)[:2]).is_equal

    def _how_changed(self, comparison: Comparison) -> Message:
        if not self.is_replayable:
            return Message("fix.not_replayable_how")
        if not comparison.has_reference and (self.reference.failed_by or self.reference.recording.exception):
            return Message("fix.not_compared_past", {"what": self._failure(self.reference, Patch())})
        if comparison.difference is None or not comparison.has_reference:
            return Message("fix.not_compared")
        return Message("fix.gradients_differ", {"difference": comparison.difference})

    def _detail(self, trial: Trial, patch: Patch, runs: bool, went_further: bool) -> Message:
        if trial.timed_out:
            return Message("fix.candidate_timed_out")
        steps = len(trial.recording.steps)
        if runs:
            return Message("fix.ran", {"count": steps}) if steps else Message("fix.ran_to_end")
        what = {"what": self._failure(trial, patch)}
        return Message("fix.further_fault" if went_further else "fix.still_fails", what)

    def _failure(self, trial: Trial, patch: Patch) -> str:
        """The fault by its code, or the exception's own message, and where it was raised on disk."""
        faults = faults_of(trial)
        if faults:
            return faults[0].code
        kind, text = trial.failed_by or trial.recording.exception or ("?", "")
        words = f"{kind}: {text.strip().splitlines()[0]}" if text.strip() else kind
        words = words if len(words) <= _LONGEST else f"{words[: _LONGEST - 1]}…"
        if trial.failed_at is None:
            return words
        file, line = trial.failed_at
        on_disk, _ = patch.line_before(file, line)
        return self.say(Message("fix.failure_at", {"what": words, "file": shown_path(file, self.cwd), "line": on_disk}))


def _verdict(
    comparison: Comparison, training: Training, passed: bool, is_known: bool
) -> Literal["same", "gradients", "changed", "rejected"] | None:
    if not passed:
        return "rejected"
    if not is_known or comparison.difference is None:
        return None
    if not comparison.is_equal:
        return "changed"
    return "gradients" if training.differs_in else "same"


def _differs_in(verdict: str | None, comparison: Comparison, training: Training) -> tuple[str, ...]:
    if verdict is None or verdict == "same" or comparison.difference is None:
        return ()
    gradients = () if comparison.is_equal else ("gradients",)
    return (*gradients, *training.differs_in)


def callers_value(fault: Diagnosis, so_far: Patch, trials: Iterable[tuple[Patch, Trial]]) -> Message | None:
    """What changes where the fault's write also reaches the tensor of its caller, which goes on to read it (GS216).

    The backward that fails hides that; a run of a candidate that gets past it shows it. None where no run has.
    """
    written = _places("written", fault, so_far)
    for patch, trial in trials:
        for one in faults_of(trial):
            if one.code == "GS216" and one.tensor is not None and written & _places("written", one, patch):
                return Message("help.second_name_copied_how", {"name": one.tensor.name})
    return None


def layers_argument(fault: Diagnosis) -> Message | None:
    """What changes where the fault's writes are layers with ``inplace=True`` whose results the program goes on with.

    That the layer's argument changes, too, is then no purpose of the call. None where a result is dropped.
    """
    frames = [label.frame for label in fault.labels if label.role == "written"]
    if fault.cause != "inplace_module" or not frames or any(map(source.drops_result, frames)):
        return None
    given = dict.fromkeys(source.first_argument(frame) or "?" for frame in frames)
    return Message("help.second_name_copied_how", {"name": ", ".join(given)})


def begins_with_another_loss(reference: Recording, candidate: Recording) -> bool:
    """Whether the very first loss, before any training, differs from that of the program as written."""
    if not (reference.begun and candidate.begun):
        return False
    right, tried = reference.begun[0], candidate.begun[0]
    is_near = math.isclose(right, tried, rel_tol=tolerance(reference.dtype), abs_tol=1e-9)
    return not is_near and not (math.isnan(right) and math.isnan(tried))


_SPARES = frozenset({"scale_out_of_place", "copy_second_name"})
"""Kinds whose purpose is that one value, or attribute, is no longer written, with all tensors in it."""


def _loss(comparison: Comparison, training: Training, fix: Fix) -> Message | None:
    """The message about a part of the training that a running candidate has lost, so that it is no fix; else None."""
    if gone := comparison.lost or comparison.mistaken:
        return Message("fix.trains_nothing" if comparison.lost else "fix.takes_gradients", {"count": gone})
    if training.overwritten:
        return Message("fix.overwrites_gradients", {"names": ", ".join(training.overwritten)})
    attributes = {name.partition("[")[0].rpartition(".")[2] for name in training.frozen}
    if training.frozen and not (fix.kind in _SPARES and len(attributes) == 1):
        return Message("fix.no_longer_written", {"names": ", ".join(training.frozen)})
    if training.drawn:
        return Message("fix.drawn_again", {"what": ", ".join(training.drawn)})
    if comparison.is_equal and training.kept and fix.kind not in _SPARES:
        # The gradients are equal: kept values have no reason to differ, unless they were meant to be copies.
        return Message("fix.keeps_another", {"names": ", ".join(training.kept)})
    return None


def _repeats(reference: Recording, candidate: Recording) -> bool:
    """Whether the candidate calls modules more often with the same arguments, per backward."""
    begun = len(reference.begun), len(candidate.begun)
    return candidate.repeated * begun[0] > reference.repeated * begun[1]


def faults_of(trial: Trial) -> list[Diagnosis]:
    """The findings to fix, the one that ended the program first: errors, then silent faults.

    A note counts where the program ended in its line with something that is None: the ``.grad`` of a result.
    """
    found = [one for one in trial.diagnoses if one.severity in ("error", "warning") or _ended_by(one, trial)]
    return sorted(found, key=lambda one: (one.silent, one.severity != "error"))


def _ended_by(note: Diagnosis, trial: Trial) -> bool:
    _, text = trial.failed_by or trial.recording.exception or ("", "")
    used = {(one.frame.file, one.frame.line) for one in note.labels if one.role == "used"}
    return "NoneType" in text and trial.failed_at in used


def findings_to_try(trial: Trial) -> list[Diagnosis]:
    """The findings to fix; notes as well behind an error without a candidate, which one of them may have led to."""
    faults = faults_of(trial)
    if not faults or faults[0].severity != "error" or any(fix.lines for fix in faults[0].fixes):
        return faults
    return [*faults, *(one for one in trial.diagnoses if one not in faults)]


def is_same_finding(one: Diagnosis, patch: Patch, other: Diagnosis, other_patch: Patch) -> bool:
    """Whether two runs, each with a patch, have told of one fault: the same code, and a place in common on disk."""
    mine, others = (
        set().union(*(_places(role, fault, made) for role in _roles(fault)))
        for fault, made in ((one, patch), (other, other_patch))
    )
    return one.code == other.code and not mine.isdisjoint(others)


def _roles(fault: Diagnosis) -> set[str]:
    """The roles of labels that tell findings apart: those of backwards only where there are no others."""
    roles: set[str] = {label.role for label in fault.labels}
    return roles - {"used"} or roles


def _progress(trial: Trial) -> tuple[bool, int, int]:
    return trial.recording.finished, len(trial.recording.losses), len(trial.recording.steps)


def _is_born_later(trial: Trial, before: Trial, patch: Patch, so_far: Patch) -> bool:
    """Whether the first nonfinite value is in a later round than before, or from another operation."""
    first, last = next(iter(faults_of(before)), None), next(iter(faults_of(trial)), None)
    if first is None or last is None or first.nonfinite is None or last.nonfinite is None:
        return False
    if last.nonfinite.round != first.nonfinite.round:
        return last.nonfinite.round > first.nonfinite.round
    return bool(_places("origin", last, patch) - _places("origin", first, so_far))


def _has_another_fault(trial: Trial, before: Trial, patch: Patch, so_far: Patch) -> bool:
    """Whether the program ends no earlier, and with writes, or at a save, that had not been reported before."""
    if _progress(trial) < _progress(before) or not faults_of(trial):
        return False
    fault = faults_of(trial)[0]
    is_new_write = bool(trial.written[trial.diagnoses.index(fault)] - frozenset().union(*before.written))
    # A buffer that several operations have saved: a copy for one of them leaves the others. Or a statement that reads
    # like the one before, in a line that the patch leaves as it was.
    return is_new_write or any(
        _places(role, fault, patch, unchanged=unchanged)
        - set().union(*(_places(role, one, so_far) for one in before.diagnoses))
        for role, unchanged in (("saved", False), ("written", True))
    )


def _places(role: str, fault: Diagnosis, patch: Patch, *, unchanged: bool = False) -> set[tuple[str, int, str | None]]:
    labels = [one for one in fault.labels if one.role == role]
    places = [(one, *patch.line_before(one.frame.file, one.frame.line)) for one in labels]
    return {(one.frame.file, line, one.op) for one, line, is_equal in places if is_equal or not unchanged}


@dataclass(frozen=True, slots=True)
class Tried:
    """A candidate that was run. ``patch`` contains this fix and those of the faults before it."""

    fix: Fix
    patch: Patch
    trial: Trial
    passed: bool
    went_further: bool
