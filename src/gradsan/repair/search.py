"""Search for fixes: one fault after another, each candidate run in a process of its own."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from gradsan.diagnose.value_fixes import LEFT_CONSTANT, LEFT_UNRECORDED, TRAINED_BY_BOTH
from gradsan.launch import program
from gradsan.launch.ranks import rank_of
from gradsan.model import Diagnosis, Fix, Message, Seen
from gradsan.present._places import shown_path
from gradsan.repair import libraries
from gradsan.repair.finite import is_nonfinite
from gradsan.repair.judging import (
    APART,
    Judge,
    Say,
    Tried,
    begins_with_another_loss,
    callers_value,
    faults_of,
    findings_to_try,
    is_same_finding,
    layers_argument,
)
from gradsan.repair.libraries import untried
from gradsan.repair.patch import Patch, PatchError, on_disk
from gradsan.repair.ranking import measured, ranked_fixes, settled
from gradsan.repair.reference import healed_run, is_replayable, was_refused
from gradsan.repair.trials.runner import Runner, cores_for_trials
from gradsan.repair.trials.trial import Cost, Request, Trial

Target = tuple[str, str, Sequence[str]]
Progress = Callable[[Message], None]
Agree = Callable[[Message], bool]

_STEPS_MEASURED = 3
_FILES_NAMED = 4
_FURTHER = 100
"""Factor on the number of steps for a program without a fault so far."""
_TRIALS = 4
"""The number of such runs that must fit into the time limit of one."""
_LEAST_SECONDS = 1.0
"""Seconds of each trial before it may end with fewer than ``Limits.steps`` steps."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a search: optimizer steps and seconds per run, candidates per fault, faults per program."""

    steps: int = 20
    timeout: float = 300.0
    candidates: int = 8
    faults: int = 5
    include_libraries: bool = False


@dataclass(frozen=True, slots=True)
class Found:
    """The result of a search: the faults with their fixes as tried, best first.

    ``chosen`` are the fixes that got the program further, one for each fault in order. ``patches`` are those of the
    last fault whose program runs to its end, best first, in the order of their fixes; each contains the chosen fixes of
    the faults before it. ``exception`` is how the original program fails, ``left`` how it still fails after all fixes
    that helped; ``remaining`` are the codes of silent faults that these patches leave. ``is_incomplete`` says that it
    could not be run to its failure. ``lets_through``: the user agreed that trials may have effects outside of the
    scratch layer. ``files`` are the user's files that the program read.
    """

    diagnoses: tuple[Diagnosis, ...] = ()
    chosen: tuple[Fix, ...] = ()
    patches: tuple[Patch, ...] = ()
    exception: tuple[str, str] | None = None
    left: tuple[str, str] | None = None
    remaining: tuple[str, ...] = ()
    problems: tuple[Message, ...] = ()
    is_incomplete: bool = False
    seen: Seen = field(default_factory=Seen)
    output: str = ""
    lets_through: bool = False
    files: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Search:
    """A search: ``request`` is common to all its trials, up to ``side_by_side`` at once; ``judge`` compares them."""

    runner: Runner
    request: Request
    limits: Limits
    progress: Progress
    judge: Judge
    side_by_side: int
    reference: Request

    def noise(self) -> frozenset[str]:
        """The differences between two runs of the reference: of chance, or of the addresses at which objects lie."""
        return frozenset(self.judge.training(self.runner.run(replace(self.reference, shifted=True))).differs_in)


def find_fixes(
    target: Target,
    limits: Limits,
    progress: Progress,
    say: Say,
    cwd: Path | None,
    agree: Agree = lambda _: False,
) -> Found:
    """Run the program, then candidate fixes, until it runs or no candidate gets it further.

    For a job of several ranks, the program alone is run: each rank would search by its own findings.
    ``progress`` is called with the name of each run; ``say`` renders a Message in the words of the report. ``agree`` is
    asked whether every trial may do what cannot be kept in a scratch layer: write such a file, start such a process.
    """
    with Runner(_target(target)) as runner:
        request = _request(target, limits)
        progress(Message("fix.running_original"))
        first = run_first(runner, request, cwd, agree)
        if isinstance(first, Message):
            return Found(problems=(first, Message("fix.yes_lets_through")), is_incomplete=True)
        request = replace(request, lets_through=first.lets_through)
        found = _find(runner, request, first.trial, limits, progress, say, cwd)
        return replace(found, lets_through=request.lets_through, files=first.trial.read_files)


@dataclass(frozen=True, slots=True)
class First:
    """The first run of a program, and whether the user agreed to effects outside of the scratch layer."""

    trial: Trial
    lets_through: bool


def run_first(runner: Runner, request: Request, cwd: Path | None, agree: Agree) -> First | Message:
    """Run ``request``; if it needs effects outside of the scratch layer, again if ``agree`` allows them.

    The question, where it does not.
    """
    trial = runner.run(request)
    if trial.uncovered is None:
        return First(trial, request.lets_through)
    question = _uncovered(*trial.uncovered, cwd)
    return First(runner.run(replace(request, lets_through=True)), True) if agree(question) else question


def _uncovered(kind: str, what: str, place: tuple[str, int] | None, cwd: Path | None) -> Message:
    shown = shown_path(what, cwd) if kind == "writes" else what
    at = "?" if place is None else f"{shown_path(place[0], cwd)}:{place[1]}"
    return Message(f"fix.uncovered_{kind}", {"what": shown, "place": at})


def _find(
    runner: Runner, request: Request, current: Trial, limits: Limits, progress: Progress, say: Say, cwd: Path | None
) -> Found:
    rank = rank_of(os.environ)
    if rank is None and limits.include_libraries and (folders := libraries.taking_part(faults_of(current))):
        request = replace(request, own_folders=folders)
        current = runner.run(request)
    if _has_only_values(current):
        progress(Message("fix.running_search"))
        searching = replace(request, searches=True)
        searched = runner.run(searching)
        if faults_of(searched):
            request, current = searching, searched
    sentences: tuple[Message, ...] = ()
    if _may_show_more(current):
        progress(Message("fix.running_further"))
        longer = replace(request, steps=limits.steps * _FURTHER)
        searched = runner.run(replace(longer, timeout=limits.timeout / _TRIALS))
        if searched.is_answered:
            request, current = longer, searched
        if _may_show_more(current):
            sentences = (Message("fix.nothing_so_far", {"steps": request.steps}),)
    first = current
    if current.changed_files:
        progress(_kept_aside(current.changed_files, cwd))
    if current.timed_out:
        problem = Message("fix.timed_out", {"seconds": limits.timeout})
        return Found(problems=(problem,), is_incomplete=True, output=current.output)
    if not current.is_answered:
        problem = Message("fix.no_answer", {"status": current.status})
        return Found(problems=(problem,), is_incomplete=True, output=current.output)
    if not faults_of(current):
        return Found(exception=current.recording.exception, problems=sentences, output=current.output)
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
    # As long as the unchanged program ran until its failure, and three rounds beyond it in any case.
    past, seconds = len(current.recording.begun), max(_LEAST_SECONDS, current.seconds)
    is_once = any(fault.cause == "graph_built_once" for fault in faults_of(current))
    request = replace(request, past=past, enough_seconds=seconds if limits.steps else 0.0, hears_calls=is_once)
    reference, healed = healed_run(runner, request, findings_to_try(current))
    judge = Judge(healed, _computes_the_same(runner, reference, current, healed), say, cwd)
    request = _as_far_as(healed, request)
    search = _Search(runner, request, limits, progress, judge, _side_by_side(current, healed), reference)

    diagnoses: list[Diagnosis] = []
    chosen: list[Fix] = []
    patch = Patch()
    winners: tuple[Tried, ...] = ()
    mended = 0
    for _ in range(limits.faults):
        first_fault = faults_of(current)[0]
        fault = _to_try(search, findings_to_try(current), patch)
        tried, rest = _try_all(search, fault, patch, current)
        ranked = ranked_fixes(measured(tried, partial(_measured, search)), was_refused=was_refused(fault))
        ranked[:1] = [_without_needless(search, one, patch, current) for one in ranked[:1]]
        diagnoses.append(on_disk(replace(fault, fixes=(*(one.fix for one in ranked), *rest)), patch))
        passed = tuple(one for one in ranked if one.passed)
        best = next((one for one in ranked if one.passed or one.went_further), None)
        if best is None:
            if fault is not first_fault:
                diagnoses.insert(len(diagnoses) - 1, untried(first_fault, limits.candidates, cwd))
            break
        chosen.append(best.fix)
        patch, current = best.patch, best.trial
        if passed:
            winners, mended = passed, len(chosen)
        if not faults_of(current):
            break
    if winners:
        # Of a fault behind those that the patches mend, no candidate has passed.
        chosen, current, diagnoses = chosen[:mended], winners[0].trial, diagnoses[: mended + 1]
    return Found(
        diagnoses=tuple(diagnoses),
        chosen=tuple(chosen),
        patches=tuple(one.patch for one in winners),
        exception=first.recording.exception,
        left=current.recording.exception,
        remaining=tuple(dict.fromkeys(one.code for one in faults_of(current))) if winners else (),
        problems=() if judge.is_replayable else (Message("fix.not_replayable"),),
        seen=first.seen,
        output=first.output,
    )


def _computes_the_same(runner: Runner, reference: Request, first: Trial, healed: Trial) -> bool:
    """Whether two runs compute the same. With memory of their own, expanded tensors may have other values."""
    if is_replayable(first, healed) or "own_memory" not in reference.allowances:
        return is_replayable(first, healed)
    return is_replayable(healed, runner.run(reference))


def _may_show_more(trial: Trial) -> bool:
    """Whether a program without a fault so far was ended early.

    A validation may fail after hundreds of steps, and objects that train nothing, such as a scheduler of a replaced
    optimizer, are detected only after many rounds.
    """
    return trial.is_answered and trial.recording.was_ended and not faults_of(trial)


def _has_only_values(trial: Trial) -> bool:
    """Whether the only fault is a nonfinite value, so that a search may find its origin."""
    is_noticed = all(fault.nonfinite is not None for fault in faults_of(trial))
    return trial.is_answered and not trial.timed_out and is_noticed and is_nonfinite(trial)


def _as_far_as(healed: Trial, request: Request) -> Request:
    """``request`` for candidates: up to the step at which the reference was ended, or to the program's own end."""
    recording = healed.recording
    if recording.was_ended:
        return replace(request, until=tuple(Counter(one.key for one in recording.steps).items()))
    return replace(request, enough_seconds=0.0) if recording.finished else request


def _kept_aside(files: Sequence[str], cwd: Path | None) -> Message:
    names = ", ".join(shown_path(file, cwd) for file in files[:_FILES_NAMED])
    more = len(files) - _FILES_NAMED
    return Message("fix.kept_aside", {"names": names if more <= 0 else f"{names}, …"})


def runs_well(
    target: Target,
    limits: Limits,
    *,
    lets_through: bool = False,
    ends_by: tuple[str, str] | None = None,
    remaining: Sequence[str] = (),
) -> bool:
    """Whether the program on disk ends within the limits, without a fault, and with no exception but one.

    ``ends_by`` is the exception that also ends the healed program, ``remaining`` the codes of faults that it has, too.
    """
    with Runner(_target(target), is_warm=False) as runner:
        trial = runner.run(replace(_request(target, limits), lets_through=lets_through))
    is_well = trial.recording.exception is None and trial.status == 0
    is_well = is_well or (ends_by is not None and trial.recording.exception == ends_by)
    return not trial.timed_out and is_well and all(one.code in remaining for one in faults_of(trial))


def _side_by_side(*trials: Trial) -> int:
    return 1 if any(trial.runs_alone for trial in trials) else cores_for_trials()


def _target(target: Target) -> program.Target:
    return program.Target(*target[:2], tuple(target[2]))  # type: ignore[arg-type]


def _request(target: Target, limits: Limits) -> Request:
    return Request((*target[:2], tuple(target[2])), "watch", {}, limits.steps, limits.timeout)


def _try_all(search: _Search, fault: Diagnosis, patch: Patch, before: Trial) -> tuple[list[Tried], list[Fix]]:
    """Run every candidate that has lines; the other fixes are returned as advice."""
    candidates: list[tuple[Fix, Patch]] = []
    advice: list[Fix] = []
    contents: set[tuple[tuple[str, bytes], ...]] = set()
    for fix in fault.fixes:
        candidate = _candidate(search, fix, patch)
        if candidate is None:
            advice.append(replace(fix, lines=()))
            continue
        content = tuple(sorted(candidate.files.items()))
        if content in contents:
            continue
        contents.add(content)
        if len(candidates) >= search.limits.candidates:
            advice.append(replace(fix, lines=(), diff=candidate.diff(search.judge.cwd)))
            continue
        candidates.append((fix, candidate))
    for number, (fix, _) in enumerate(candidates, 1):
        values = {"number": number, "total": len(candidates), "kind": fix.kind}
        search.progress(Message("fix.running_candidate", values))
    requests = [replace(search.request, files=dict(candidate.files)) for _, candidate in candidates]
    trials = search.runner.run_all(requests, side_by_side=search.side_by_side)
    judge = replace(
        search.judge,
        is_of_values=fault.nonfinite is not None,
        unrecorded=_unrecorded(fault) or _undefined(search, fault, before),
        so_far=patch,
        others=tuple(
            one
            for one in search.judge.reference.findings
            if one.severity == "warning" and not is_same_finding(fault, patch, one, Patch())
        ),
        spared=callers_value(fault, patch, zip((one for _, one in candidates), trials, strict=True))
        or layers_argument(fault),
    )
    if any(map(judge.is_in_doubt, trials)):
        judge = replace(judge, noise=search.noise())
        # A time may have been the same in both runs of the reference, or unread in one.
        for number, first in enumerate(trials):
            if judge.is_in_doubt(first):
                trials[number] = search.runner.run(requests[number])
                chance = replace(judge, reference=first).training(trials[number])
                judge = replace(judge, noise=judge.noise | {*chance.differs_in})
    tried = [
        judge.tried(fix, candidate, trial, before) for (fix, candidate), trial in zip(candidates, trials, strict=True)
    ]
    if not any(one.passed for one in tried):
        advice += libraries.advice(fault)
    return settled(tried), advice


def _without_needless(search: _Search, best: Tried, earlier: Patch, before: Trial) -> Tried:
    """``best`` without the fixes of the faults before it, where the last one alone has the same training."""
    patch = best.patch.without(earlier) if best.passed and earlier.size else earlier
    if not patch.size or patch.files == best.patch.files:
        return best
    trial = search.runner.run(replace(search.request, files=dict(patch.files)))
    # Where neither passes, the next fault of both must be one: the earlier fixes alone may end at this one's place.
    ends = faults_of(trial), faults_of(best.trial)
    if not best.passed and not (all(ends) and is_same_finding(ends[0][0], patch, ends[1][0], best.patch)):
        return best
    alone = search.judge.tried(replace(best.fix, lines=()), patch, trial, before)
    mine, other = (replace(one.fix.verification, time_ratio=None, memory_ratio=None) for one in (alone, best))
    return replace(alone, fix=replace(alone.fix, verification=best.fix.verification)) if mine == other else best


def _to_try(search: _Search, faults: Sequence[Diagnosis], patch: Patch) -> Diagnosis:
    """The first fault that has a candidate: an error may only be what another finding of the same run led to."""
    with_candidates = (one for one in faults if any(_candidate(search, fix, patch) for fix in one.fixes))
    return next(with_candidates, faults[0])


def _unrecorded(fault: Diagnosis) -> Message | None:
    """The diagnosis's message about a fix whose gradients may not be those that were meant; None without one."""
    hows = (fix.how_changed for fix in fault.fixes if fix.how_changed is not None)
    return next((how for how in hows if how.key in (LEFT_CONSTANT, LEFT_UNRECORDED, TRAINED_BY_BOTH)), None)


def _undefined(search: _Search, fault: Diagnosis, before: Trial) -> Message | None:
    """How the training changes where a write to shared memory has made the loss another than it is with own memory."""
    if "own_memory" not in search.reference.allowances:
        return None
    name = fault.tensor.name if fault.tensor is not None else None
    is_another = begins_with_another_loss(search.judge.reference.recording, before.recording)
    return Message(APART, {"name": name or "?"}) if is_another else None


def _candidate(search: _Search, fix: Fix, patch: Patch) -> Patch | None:
    may_touch = search.limits.include_libraries or not any(libraries.is_library(file) for file, _, _ in fix.lines)
    if not fix.lines or not may_touch:
        return None
    try:
        candidate = patch.with_lines(fix.lines)
    except PatchError:
        return None
    # Two calls swapped for the fault before this one would only be swapped back.
    return candidate if candidate.size else None


def _measured(search: _Search, patches: Sequence[Patch]) -> list[Cost | None]:
    search.progress(Message("fix.measuring"))
    steps = min(search.limits.steps or _STEPS_MEASURED, _STEPS_MEASURED)
    requests = [replace(search.request, mode="measure", files=dict(one.files), steps=steps) for one in patches]
    return [trial.cost for trial in search.runner.run_all(requests, side_by_side=search.side_by_side)]
