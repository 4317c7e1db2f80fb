"""What a trial of a candidate says: whether it helped, and what it does to the gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from gradsan.model import Diagnosis, Fix, Message, Verification
from gradsan.repair.compare import Comparison, compare
from gradsan.repair.patch import Patch
from gradsan.repair.ranking import Tried
from gradsan.repair.trial import Recording, Trial

Say = Callable[[Message], str]


@dataclass(frozen=True, slots=True)
class Judge:
    """What candidates are held against.

    ``reference`` is the healed original; ``is_replayable`` says that two runs of the program compute the same, without
    which no difference tells anything. ``say`` puts a Message into the words of the report, ``cwd`` is what paths are
    shown relative to.
    """

    reference: Recording
    is_replayable: bool
    say: Say
    cwd: Path | None

    def tried(self, fix: Fix, patch: Patch, trial: Trial, before: Trial) -> Tried:
        """The candidate ``fix`` with what its ``trial`` showed; ``before`` is the program without it."""
        comparison = compare(self.reference, trial.recording)
        runs = trial.recording.finished and not faults_of(trial)
        went_further = not trial.timed_out and (
            _progress(trial) > _progress(before) or _has_another_fault(trial, before)
        )
        passed = runs and not comparison.lost
        is_known = comparison.has_reference and self.is_replayable
        verification = Verification(
            status="passed" if passed else "failed",
            detail=self.say(_detail(trial, comparison, runs, went_further)),
            gradient_difference=comparison.difference if is_known else None,
            time_ratio=None,
            memory_ratio=None,
        )
        tested = replace(fix, diff=patch.diff(self.cwd), lines=(), applicability="review", verification=verification)
        if passed and is_known and comparison.is_equal:
            tested = replace(tested, meaning="preserved", how_changed=None, applicability="automatic")
        elif passed and is_known and comparison.left_differs:
            tested = replace(tested, meaning="changed", how_changed=Message("fix.left_gradients_differ"))
        elif passed:
            how = fix.how_changed or self._how_changed(comparison)
            tested = replace(tested, meaning="changed", how_changed=how)
        else:
            # Whatever was suggested, nothing of it has been measured to its end.
            tested = replace(tested, meaning="changed", how_changed=Message("fix.not_measured"))
        return Tried(tested, patch, trial, passed, went_further and not comparison.lost)

    def _how_changed(self, comparison: Comparison) -> Message:
        if not self.is_replayable:
            return Message("fix.not_replayable_how")
        if comparison.difference is None or not comparison.has_reference:
            return Message("fix.not_compared")
        return Message("fix.gradients_differ", {"difference": comparison.difference})


def faults_of(trial: Trial) -> list[Diagnosis]:
    """What is to be mended, what ended the program first: errors, then what PyTorch does not report."""
    found = [one for one in trial.diagnoses if one.severity in ("error", "warning")]
    return sorted(found, key=lambda one: (one.silent, one.severity != "error"))


def _detail(trial: Trial, comparison: Comparison, runs: bool, went_further: bool) -> Message:
    if trial.timed_out:
        return Message("fix.candidate_timed_out")
    steps = len(trial.recording.steps)
    if runs and comparison.lost:
        return Message("fix.trains_nothing", {"count": comparison.lost})
    if runs:
        return Message("fix.ran", {"count": steps}) if steps else Message("fix.ran_to_end")
    faults = faults_of(trial)
    what = faults[0].code if faults else (trial.recording.exception or ("?", ""))[0]
    return Message("fix.further_fault" if went_further else "fix.still_fails", {"what": what})


def _progress(trial: Trial) -> tuple[bool, int, int]:
    return trial.recording.finished, len(trial.recording.losses), len(trial.recording.steps)


def _has_another_fault(trial: Trial, before: Trial) -> bool:
    """Whether the program stops no earlier, and by writes that had not been told before."""
    if _progress(trial) < _progress(before) or not faults_of(trial):
        return False
    known = frozenset().union(*before.written)
    written = trial.written[trial.diagnoses.index(faults_of(trial)[0])]
    return bool(written - known)
