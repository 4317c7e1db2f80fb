"""From a failing program to fixes that were run: one fault after another, each candidate in a process of its own."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from gradsan.model import Diagnosis, Fix, Message, Seen, Verification
from gradsan.repair.compare import Comparison, compare
from gradsan.repair.patch import Patch, PatchError
from gradsan.repair.ranking import Tried, measured, ranked_fixes
from gradsan.repair.trial import Cost, Recording, Trial, run_trial

Target = tuple[str, str, Sequence[str]]
Progress = Callable[[Message], None]
Say = Callable[[Message], str]

_STEPS_MEASURED = 5


@dataclass(frozen=True, slots=True)
class Limits:
    """How far a search goes: optimizer steps and seconds of each run, candidates of a fault, faults of a program."""

    steps: int = 20
    timeout: float = 300.0
    candidates: int = 8
    faults: int = 5
    include_libraries: bool = False


@dataclass(frozen=True, slots=True)
class Found:
    """What a search found: the faults with their fixes as they were tried, best first.

    ``patches`` are those of the last fault whose program runs to its end, best first, in the order in which their fixes
    stand; ``exception`` is how the program fails as it stands, ``left`` how it still fails after all that helped.
    """

    diagnoses: tuple[Diagnosis, ...] = ()
    patches: tuple[Patch, ...] = ()
    exception: tuple[str, str] | None = None
    left: tuple[str, str] | None = None
    problems: tuple[Message, ...] = ()
    seen: Seen = field(default_factory=Seen)
    output: str = ""


@dataclass(slots=True)
class _Search:
    target: Target
    limits: Limits
    progress: Progress
    say: Say
    cwd: Path | None
    reference: Recording = field(default_factory=Recording)


def find_fixes(target: Target, limits: Limits, progress: Progress, say: Say, cwd: Path | None) -> Found:
    """Run the program, then what may mend it, until it runs or no candidate brings it further.

    ``progress`` is told what is being run; ``say`` puts a Message into the words of the report.
    """
    search = _Search(target, limits, progress, say, cwd)
    progress(Message("fix.running_original"))
    current = run_trial(target, "watch", Patch(), limits.steps, limits.timeout)
    first = current
    if current.timed_out:
        return Found(problems=(Message("fix.timed_out", {"seconds": limits.timeout}),), output=current.output)
    if not _faults(current):
        return Found(exception=current.recording.exception, output=current.output)
    progress(Message("fix.running_healed"))
    search.reference = run_trial(target, "heal", Patch(), limits.steps, limits.timeout).recording

    diagnoses: list[Diagnosis] = []
    patch = Patch()
    winners: tuple[Tried, ...] = ()
    for _ in range(limits.faults):
        fault = _faults(current)[0]
        tried, rest = _try_all(search, fault, patch, current)
        ranked = ranked_fixes(measured(tried, partial(_measure, search)))
        diagnoses.append(replace(fault, fixes=(*(one.fix for one in ranked), *rest)))
        winners = tuple(one for one in ranked if one.passed)
        best = next((one for one in ranked if one.passed or one.went_further), None)
        if best is None:
            break
        patch, current = best.patch, best.trial
        if best.passed or not _faults(current):
            break
    return Found(
        diagnoses=tuple(diagnoses),
        patches=tuple(one.patch for one in winners),
        exception=first.recording.exception,
        left=current.recording.exception,
        seen=first.seen,
        output=first.output,
    )


def _faults(trial: Trial) -> list[Diagnosis]:
    return [one for one in trial.diagnoses if one.severity in ("error", "warning")]


def _try_all(search: _Search, fault: Diagnosis, patch: Patch, before: Trial) -> tuple[list[Tried], list[Fix]]:
    """Run every candidate that has lines; the other fixes come back as advice."""
    tried: list[Tried] = []
    rest: list[Fix] = []
    seen: set[tuple[tuple[str, bytes], ...]] = set()
    candidates = [fix for fix in fault.fixes if fix.lines]
    for fix in fault.fixes:
        if not fix.lines or len(tried) >= search.limits.candidates or not _may_touch(fix, search.limits):
            rest.append(replace(fix, lines=fix.lines if _may_touch(fix, search.limits) else ()))
            continue
        try:
            candidate = patch.with_lines(fix.lines)
        except PatchError:
            rest.append(replace(fix, lines=()))
            continue
        content = tuple(sorted(candidate.files.items()))
        if content in seen:
            continue
        seen.add(content)
        number, total = len(tried) + 1, len(candidates)
        search.progress(Message("fix.running_candidate", {"number": number, "total": total, "kind": fix.kind}))
        trial = run_trial(search.target, "watch", candidate, search.limits.steps, search.limits.timeout)
        tried.append(_judged(search, fix, candidate, trial, before))
    return tried, rest


def _judged(search: _Search, fix: Fix, patch: Patch, trial: Trial, before: Trial) -> Tried:
    comparison = compare(search.reference, trial.recording)
    runs = trial.recording.finished and not _faults(trial)
    went_further = not trial.timed_out and (_progress(trial) > _progress(before) or _has_another_fault(trial, before))
    trains = not comparison.lost
    passed = runs and trains
    verification = Verification(
        status="passed" if passed else "failed",
        detail=search.say(_detail(trial, comparison, runs, went_further)),
        gradient_difference=comparison.difference if comparison.has_reference else None,
        time_ratio=None,
        memory_ratio=None,
    )
    meaning = fix.meaning
    how = fix.how_changed
    if passed:
        meaning = "preserved" if comparison.is_equal else "changed"
        if meaning == "preserved":
            how = None
        elif how is None:
            is_known = comparison.difference is not None and comparison.has_reference
            key = "fix.gradients_differ" if is_known else "fix.not_compared"
            how = Message(key, {"difference": comparison.difference})
    tested = replace(
        fix,
        meaning=meaning,
        how_changed=how,
        applicability="automatic" if passed and meaning == "preserved" else "review",
        diff=patch.diff(search.cwd),
        lines=(),
        verification=verification,
    )
    return Tried(tested, patch, trial, passed, went_further and trains)


def _detail(trial: Trial, comparison: Comparison, runs: bool, went_further: bool) -> Message:
    if trial.timed_out:
        return Message("fix.candidate_timed_out")
    steps = len(trial.recording.steps)
    if runs and comparison.lost:
        return Message("fix.trains_nothing", {"count": comparison.lost})
    if runs:
        return Message("fix.ran", {"count": steps}) if steps else Message("fix.ran_to_end")
    faults = _faults(trial)
    what = faults[0].code if faults else (trial.recording.exception or ("?", ""))[0]
    return Message("fix.further_fault" if went_further else "fix.still_fails", {"what": what})


def _measure(search: _Search, patch: Patch) -> Cost | None:
    search.progress(Message("fix.measuring"))
    steps = min(search.limits.steps or _STEPS_MEASURED, _STEPS_MEASURED)
    return run_trial(search.target, "measure", patch, steps, search.limits.timeout).cost


def _progress(trial: Trial) -> tuple[bool, int, int]:
    return trial.recording.finished, len(trial.recording.losses), len(trial.recording.steps)


def _has_another_fault(trial: Trial, before: Trial) -> bool:
    """Whether the program stops no earlier, and by writes that had not been told before."""
    if _progress(trial) < _progress(before) or not _faults(trial):
        return False
    known = frozenset().union(*before.written)
    written = trial.written[trial.diagnoses.index(_faults(trial)[0])]
    return bool(written - known)


def _may_touch(fix: Fix, limits: Limits) -> bool:
    return limits.include_libraries or not any(_is_library(file) for file, _, _ in fix.lines)


def _is_library(file: str) -> bool:
    paths = sysconfig.get_paths()
    roots = {os.path.realpath(paths[name]) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    return any(os.path.realpath(file).startswith(root + os.sep) for root in roots)
