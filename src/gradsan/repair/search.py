"""From a failing program to fixes that were run: one fault after another, each candidate in a process of its own."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from gradsan._ranks import rank_of
from gradsan.model import Diagnosis, Fix, Message, Seen
from gradsan.repair import libraries
from gradsan.repair.judging import Judge, Say, faults_of
from gradsan.repair.patch import Patch, PatchError
from gradsan.repair.places import on_disk
from gradsan.repair.ranking import Tried, measured, ranked_fixes
from gradsan.repair.replay import is_replayable, reference_for, was_refused
from gradsan.repair.trial import Cost, Request, Trial, run_trial
from gradsan.repair.untried import untried

Target = tuple[str, str, Sequence[str]]
Progress = Callable[[Message], None]

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

    ``chosen`` are the fixes that brought the program further, one for each fault in order. ``patches`` are those of the
    last fault whose program runs to its end, best first, in the order in which their fixes stand; each holds the chosen
    fixes of the faults before it. ``exception`` is how the program fails as it stands, ``left`` how it still fails
    after all that helped. ``is_incomplete`` says that it could not be run to its failure.
    """

    diagnoses: tuple[Diagnosis, ...] = ()
    chosen: tuple[Fix, ...] = ()
    patches: tuple[Patch, ...] = ()
    exception: tuple[str, str] | None = None
    left: tuple[str, str] | None = None
    problems: tuple[Message, ...] = ()
    is_incomplete: bool = False
    seen: Seen = field(default_factory=Seen)
    output: str = ""


@dataclass(frozen=True, slots=True)
class _Search:
    """``request`` is what every trial of this search has in common; ``judge`` what its candidates are held against."""

    request: Request
    limits: Limits
    progress: Progress
    judge: Judge


def find_fixes(target: Target, limits: Limits, progress: Progress, say: Say, cwd: Path | None) -> Found:
    """Run the program, then what may mend it, until it runs or no candidate brings it further.

    Of a job of several ranks, the program alone is run: each rank would search by what it has found itself.
    ``progress`` is told what is being run; ``say`` puts a Message into the words of the report.
    """
    request = _request(target, limits)
    progress(Message("fix.running_original"))
    current = run_trial(request)
    rank = rank_of(os.environ)
    if rank is None and limits.include_libraries and (folders := libraries.taking_part(faults_of(current))):
        request = replace(request, own_folders=folders)
        current = run_trial(request)
    first = current
    if current.timed_out:
        problem = Message("fix.timed_out", {"seconds": limits.timeout})
        return Found(problems=(problem,), is_incomplete=True, output=current.output)
    if not current.is_answered:
        problem = Message("fix.no_answer", {"status": current.status})
        return Found(problems=(problem,), is_incomplete=True, output=current.output)
    if not faults_of(current):
        return Found(exception=current.recording.exception, output=current.output)
    if rank is not None:
        return Found(
            diagnoses=tuple(untried(fault, limits.candidates, cwd) for fault in faults_of(current)[: limits.faults]),
            exception=current.recording.exception,
            left=current.recording.exception,
            problems=(Message("fix.one_of_several_ranks", {"size": rank.size}),),
            seen=current.seen,
            output=current.output,
        )
    progress(Message("fix.running_healed"))
    healed = run_trial(reference_for(request, faults_of(current)))
    judge = Judge(healed.recording, is_replayable(current, healed), say, cwd)
    search = _Search(request, limits, progress, judge)

    diagnoses: list[Diagnosis] = []
    chosen: list[Fix] = []
    patch = Patch()
    winners: tuple[Tried, ...] = ()
    for _ in range(limits.faults):
        fault = faults_of(current)[0]
        tried, rest = _try_all(search, fault, patch, current)
        ranked = ranked_fixes(measured(tried, partial(_measure, search)), was_refused=was_refused(fault))
        diagnoses.append(on_disk(replace(fault, fixes=(*(one.fix for one in ranked), *rest)), patch))
        winners = tuple(one for one in ranked if one.passed)
        best = next((one for one in ranked if one.passed or one.went_further), None)
        if best is None:
            break
        chosen.append(best.fix)
        patch, current = best.patch, best.trial
        if best.passed or not faults_of(current):
            break
    return Found(
        diagnoses=tuple(diagnoses),
        chosen=tuple(chosen),
        patches=tuple(one.patch for one in winners),
        exception=first.recording.exception,
        left=current.recording.exception,
        problems=() if judge.is_replayable else (Message("fix.not_replayable"),),
        seen=first.seen,
        output=first.output,
    )


def runs_well(target: Target, limits: Limits) -> bool:
    """Whether the program as it lies on disk ends within the limits, without a fault and without an exception."""
    trial = run_trial(_request(target, limits))
    return not trial.timed_out and trial.recording.exception is None and trial.status == 0 and not faults_of(trial)


def _request(target: Target, limits: Limits) -> Request:
    kind, name, arguments = target
    return Request((kind, name, tuple(arguments)), "watch", {}, limits.steps, limits.timeout)


def _try_all(search: _Search, fault: Diagnosis, patch: Patch, before: Trial) -> tuple[list[Tried], list[Fix]]:
    """Run every candidate that has lines; the other fixes come back as advice."""
    tried: list[Tried] = []
    advice: list[Fix] = []
    contents: set[tuple[tuple[str, bytes], ...]] = set()
    total = min(search.limits.candidates, sum(bool(fix.lines) for fix in fault.fixes))
    for fix in fault.fixes:
        candidate = _candidate(search, fix, patch)
        if candidate is None:
            advice.append(replace(fix, lines=()))
            continue
        content = tuple(sorted(candidate.files.items()))
        if content in contents:
            continue
        contents.add(content)
        if len(tried) >= search.limits.candidates:
            advice.append(replace(fix, lines=(), diff=candidate.diff(search.judge.cwd)))
            continue
        values = {"number": len(tried) + 1, "total": total, "kind": fix.kind}
        search.progress(Message("fix.running_candidate", values))
        trial = run_trial(replace(search.request, files=dict(candidate.files)))
        tried.append(search.judge.tried(fix, candidate, trial, before))
    return tried, [*advice, *libraries.advice(fault)]


def _candidate(search: _Search, fix: Fix, patch: Patch) -> Patch | None:
    may_touch = search.limits.include_libraries or not any(libraries.is_library(file) for file, _, _ in fix.lines)
    if not fix.lines or not may_touch:
        return None
    try:
        return patch.with_lines(fix.lines)
    except PatchError:
        return None


def _measure(search: _Search, patch: Patch) -> Cost | None:
    search.progress(Message("fix.measuring"))
    steps = min(search.limits.steps or _STEPS_MEASURED, _STEPS_MEASURED)
    request = replace(search.request, mode="measure", files=dict(patch.files), steps=steps)
    return run_trial(request).cost
