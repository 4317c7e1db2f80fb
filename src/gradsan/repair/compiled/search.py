"""Comparison of a program as compiled with the same program as eager code, each in a process of its own."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from gradsan.launch import program
from gradsan.launch.ranks import rank_of
from gradsan.model import Diagnosis, Message
from gradsan.repair.compiled.judging import Compared, Judged, judged, sizes
from gradsan.repair.compiled.rounding import UNITS, tolerance
from gradsan.repair.search import Agree, Progress, Target, run_first
from gradsan.repair.trials.compiling import Compiled, Compiling, Function
from gradsan.repair.trials.runner import Runner
from gradsan.repair.trials.trial import Request, Trial

_PERTURBED = 4.0
"""Unit roundoffs by which parameters are changed to see how rounding grows."""
_OF_NOISE = 8.0
"""Multiple of the effect of such a change up to which a difference may be rounding."""
_FUNCTIONS_LEFT_OUT = 8
_UNNOTICED = "compiled_input"
_LONGEST = 160
"""Characters of an error that are quoted."""


@dataclass(frozen=True, slots=True)
class CompareLimits:
    """Limits of a comparison: ``rounds`` of training, seconds per run, and seconds to search for the difference."""

    rounds: int = 3
    timeout: float = 600.0
    seconds: float = 120.0


def compare_program(
    target: Target, limits: CompareLimits, progress: Progress, cwd: Path | None, agree: Agree = lambda _: False
) -> Compared:
    """Run the first rounds of the program as eager code and as compiled, from the same initial state, and compare.

    ``progress`` is called with the name of each run, ``agree`` asked as in ``find_fixes``.
    """
    rank = rank_of(os.environ)
    if rank is not None:
        return Compared("not_run", reasons=(Message("fix.one_of_several_ranks", {"size": rank.size}),))
    kind, name, arguments = target
    with Runner(program.Target(kind, name, tuple(arguments))) as runner:  # type: ignore[arg-type]
        request = Request((kind, name, tuple(arguments)), "watch", {}, 0, limits.timeout)
        return _Comparison(runner, request, limits, progress, cwd, agree).result()


class _Comparison:
    def __init__(
        self,
        runner: Runner,
        request: Request,
        limits: CompareLimits,
        progress: Progress,
        cwd: Path | None,
        agree: Agree,
    ) -> None:
        self.runner, self.request, self.limits, self.progress = runner, request, limits, progress
        self.cwd, self.agree = cwd, agree
        self.backwards = 0
        self.eager: Trial
        self.compiled: Compiled
        self.noise: Mapping[tuple[str, str, int], float] = {}

    def result(self) -> Compared:
        """Run the whole comparison and return its result."""
        self.progress(Message("compare.running_eager", {"count": self.limits.rounds}))
        eager = run_first(self.runner, self._asked(Compiling("none")), self.cwd, self.agree)
        if isinstance(eager, Message):
            return Compared("not_run", reasons=(eager, Message("fix.yes_lets_through")))
        self.request = replace(self.request, lets_through=eager.lets_through)
        if (problem := self._not_run(eager.trial)) is not None:
            return problem
        self.eager = eager.trial
        # A run that was stopped by an error may get further when compiled.
        has_ended_well = self.eager.recording.exception is None
        self.backwards = len(self.eager.recording.begun) if has_ended_well else 0
        self.progress(Message("compare.running_compiled"))
        plain = self._run(Compiling())
        if (problem := self._not_run(plain)) is not None:
            return problem
        if plain.compiled is None or not plain.compiled.functions:
            return Compared("nothing_compiled", output=plain.output)
        self.compiled = plain.compiled
        return self._compared(plain)

    def _compared(self, plain: Trial) -> Compared:
        reasons = list(self._ends(self.eager, plain))
        findings = _findings(self.eager, plain)
        mode = self.request.mode
        if self.eager.recording.exception is not None and len(plain.recording.begun) > len(self.eager.recording.losses):
            # Errors that stop eager code are healed: the saved values are those of the correct gradient.
            self.progress(Message("compare.running_healed"))
            self.request = replace(self.request, mode="heal")
            self.eager = self._run(Compiling("none"))
            self.request = replace(self.request, mode=mode)
            mode = "heal"
        measured = self._judged(plain)
        base = Compared(
            "same",
            self.compiled.functions,
            self.compiled.titles,
            self.compiled.backends,
            self.compiled.graphs,
            measured.rounds,
            measured.losses,
            measured.gradients,
            measured.parameters,
            measured.largest,
            measured.allowed,
            self.compiled.coarsest,
            findings=findings,
            doubts=self._doubts(plain),
            reasons=tuple(reasons),
        )
        if not measured.losses and not measured.gradients:
            return replace(base, verdict="undecided", reasons=(*reasons, Message("compare.no_backward")))
        if not measured.gradients:
            base = replace(base, doubts=(*base.doubts, Message("compare.doubt_losses_alone")))
        if not measured.found:
            return replace(base, verdict="differs") if reasons else base
        if not self._listen_to_noise(mode):
            return replace(
                base,
                verdict="undecided",
                differences=measured.found,
                reasons=(*reasons, Message("compare.not_replayable")),
            )
        found = measured.beyond(self.noise, _OF_NOISE)
        if not found and not reasons:
            return replace(base, doubts=(*base.doubts, Message("compare.doubt_grows")), rounds=measured.rounds)
        return self._located(replace(base, verdict="differs", differences=found), plain)

    def _located(self, base: Compared, plain: Trial) -> Compared:
        self.progress(Message("compare.examining", {"count": self.compiled.graphs}))
        is_unnoticed = any(one.cause == _UNNOTICED for one in base.findings)
        asked = Compiling(examines=True, looks_for_writes=is_unnoticed, seconds=self.limits.seconds)
        examined = None if (compiled := self._run(asked).compiled) is None else compiled.examined
        fragment = None if examined is None else examined.fragment
        if examined is None or examined.left:
            left = self.compiled.graphs if examined is None else examined.left
            base = replace(base, doubts=(*base.doubts, Message("compare.doubt_left", {"count": left})))
        if self.compiled.draws and (self._draw_others(plain) or (fragment is not None and fragment.draws)):
            reasons = (*base.reasons, Message("compare.other_draws", {"ops": ", ".join(self.compiled.draws)}))
            return replace(base, verdict="undecided", fragment=fragment, reasons=reasons)
        if fragment is not None:
            return replace(base, fragment=fragment, stage="fragment" if fragment.overwritten is None else "write")
        if is_unnoticed:
            return replace(base, stage="write")
        if base.reasons and not base.differences:
            return base
        self.progress(Message("compare.tracing"))
        if not self._differs(Compiling("eager")):
            return replace(base, stage="together")
        for function in self._to_leave_out():
            if not self._differs(Compiling("eager", left_out=(function,))):
                return replace(base, stage="left_out", function=function)
        return replace(base, stage="tracing")

    def _to_leave_out(self) -> tuple[Function, ...]:
        functions = self.compiled.functions
        return functions if 1 < len(functions) <= _FUNCTIONS_LEFT_OUT else ()

    def _differs(self, asked: Compiling) -> bool:
        trial = self._run(asked)
        return bool(self._judged(trial).beyond(self.noise, _OF_NOISE)) or trial.recording.exception is not None

    def _listen_to_noise(self, mode: str) -> bool:
        """Measure how rounding grows, and whether two runs of eager code compute the same at all."""
        self.progress(Message("compare.running_again"))
        assert mode in ("watch", "heal")
        request = replace(self.request, mode="heal" if mode == "heal" else "watch")
        perturbed = Compiling("none", perturbs=_PERTURBED * UNITS[self.compiled.coarsest])
        again, changed = (self.runner.run(self._asked(one, request)) for one in (Compiling("none"), perturbed))
        if any(size > 0 for size in sizes(self.eager.recording, again.recording, self._names(again)).values()):
            repeated = judged(self.eager.recording, again.recording, self._names(again), self._tolerance)
            if repeated.found:
                return False
        self.noise = sizes(self.eager.recording, changed.recording, self._names(changed))
        return True

    def _judged(self, trial: Trial) -> Judged:
        return judged(self.eager.recording, trial.recording, self._names(trial), self._tolerance)

    def _names(self, trial: Trial) -> Mapping[str, tuple[str, ...]]:
        named = [one.compiled.names for one in (trial, self.eager) if one.compiled is not None]
        return {key: name for names in named for key, name in names.items()}

    def _tolerance(self, position: int) -> float:
        return tolerance(self.compiled.roundings, self.compiled.coarsest, position)

    def _run(self, asked: Compiling) -> Trial:
        return self.runner.run(self._asked(asked))

    def _asked(self, asked: Compiling, request: Request | None = None) -> Request:
        whole = replace(asked, rounds=self.limits.rounds, backwards=self.backwards)
        # An examination takes time on top of the run.
        more = self.limits.seconds * 2 if asked.examines else 0.0
        given = self.request if request is None else request
        return replace(given, compiling=whole, timeout=given.timeout + more)

    def _not_run(self, trial: Trial) -> Compared | None:
        if trial.timed_out:
            reason = Message("compare.timed_out", {"seconds": self.limits.timeout})
        elif not trial.is_answered:
            reason = Message("fix.no_answer", {"status": trial.status})
        elif trial.recording.exception is not None and not trial.recording.begun:
            kind, what = trial.recording.exception
            reason = Message("compare.fails_at_once", {"what": _shortened(kind, what)})
        else:
            return None
        return Compared("not_run", reasons=(reason,), output=trial.output)

    def _ends(self, eager: Trial, plain: Trial) -> list[Message]:
        """The exception that ends only one of the two runs, as a message."""
        kinds = [None if one.recording.exception is None else one.recording.exception[0] for one in (eager, plain)]
        if kinds[0] == kinds[1]:
            return []
        which = "compare.eager_ends" if kinds[0] is not None else "compare.compiled_ends"
        trial = eager if kinds[0] is not None else plain
        assert trial.recording.exception is not None
        at = "" if trial.failed_at is None else f" ({Path(trial.failed_at[0]).name}:{trial.failed_at[1]})"
        return [Message(which, {"what": _shortened(*trial.recording.exception) + at})]

    def _doubts(self, plain: Trial) -> tuple[Message, ...]:
        doubts: list[Message] = []
        if self.compiled.draws:
            key = "doubt_draws" if "inductor" in self.compiled.backends else "doubt_draws_elsewhere"
            doubts.append(Message(f"compare.{key}", {"ops": ", ".join(self.compiled.draws)}))
        if self.compiled.coarsest in ("float16", "bfloat16"):
            doubts.append(Message("compare.doubt_half", {"dtype": self.compiled.coarsest}))
        if self.compiled.at_limit:
            doubts.append(Message("compare.doubt_limit"))
        if self.eager.recording.was_cut or plain.recording.was_cut:
            doubts.append(Message("compare.doubt_cut"))
        return tuple(doubts)

    def _draw_others(self, plain: Trial) -> bool:
        """Whether the random generator's state differs after equally many backwards."""
        mine = {one.begun: one.random.get("torch") for one in self.eager.recording.moments if not one.is_end}
        return any(
            mine.get(one.begun, one.random.get("torch")) != one.random.get("torch")
            for one in plain.recording.moments
            if not one.is_end
        )


def _findings(eager: Trial, plain: Trial) -> tuple[Diagnosis, ...]:
    """The findings of only one of the two runs, errors first."""
    known = [{(one.code, one.cause) for one in trial.diagnoses} for trial in (eager, plain)]
    found = [one for one in plain.diagnoses if (one.code, one.cause) not in known[0]]
    return (*found, *(one for one in eager.diagnoses if (one.code, one.cause) not in known[1] and not found))


def _shortened(kind: str, what: str) -> str:
    line = what.strip().split("\n", 1)[0]
    line = line if len(line) <= _LONGEST else f"{line[:_LONGEST]}…"
    return f"{kind}: {line}" if line else kind
