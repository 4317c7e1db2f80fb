"""Runs a program plain, in deep mode and in heal mode, and holds gradsan's word against the truth.

The truth is what plain PyTorch does beside the reference: it *raises*, or some gradient is *wrong* though nothing was
raised, or all is *right*.
"""

from __future__ import annotations

import itertools
import linecache
import threading
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import statements as s
from reference_run import TOLERANCE, NotAProgramError, Reference, differs

import gradsan

_VERSION_ERROR = "modified by an inplace operation"
# Findings in which no saved value is stale: the reference knows nothing of what the program meant.
_NO_CONFLICT = ("no_grad_write", "forward_alias")
_SURELY = 1e-6
_ROUNDING = 1e-12

# A program has a thread to itself: what gradsan reads of its frames is then the program's own. The file name says that
# this is no code of the user's.
_ATTEMPT = """
def attempt(code, scope, errors):
    try:
        exec(code, scope)
    except (RuntimeError, IndexError) as error:
        errors.append(error)
"""
_names: dict[str, Any] = {}
exec(s.PRELUDE, _names)
_harness: dict[str, Any] = {}
exec(compile(_ATTEMPT, "<frozen oracle>", "exec"), _harness)
_files = itertools.count()


@dataclass(frozen=True)
class Outcome:
    """What a run showed: the gradients, and the error that ended it with the statement (by its number) it came from."""

    seen: list[list[Any]]
    error: str | None = None
    at: int | None = None

    @property
    def stale(self) -> bool:
        """Whether it was PyTorch's version check that ended it."""
        return self.error is not None and _VERSION_ERROR in self.error


@dataclass(frozen=True)
class Truth:
    """A program that PyTorch takes, what it does plainly, and what it should compute."""

    program: s.Program
    plain: Outcome
    right: list[list[Any]]

    @property
    def wrong(self) -> float:
        """How far a gradient that was computed is from the right one."""
        return differs(self.plain.seen, self.right)

    @property
    def verdict(self) -> str:
        """``right``, ``wrong``, ``raises``, ``wrong and raises``; ``unclear`` where rounding decides."""
        if TOLERANCE < self.wrong < _SURELY:
            return "unclear"
        parts = ["wrong"] * (self.wrong > TOLERANCE) + ["raises"] * self.plain.stale
        return " and ".join(parts) or "right"


class Compiled:
    """A program as code, with a file name of its own under which its lines can be read."""

    def __init__(self, program: s.Program) -> None:
        text = s.body(program)
        self.name = f"<program {next(_files)}>"
        linecache.cache[self.name] = (len(text), None, text.splitlines(keepends=True), self.name)
        self._code = compile(text, self.name, "exec")

    def run(self) -> Outcome:
        """Run it once."""
        seen: list[list[Any]] = []
        scope = {**_names, "seen": seen}
        # The functions of the prelude must find this run's list.
        for helper in ("see", "take"):
            scope[helper] = type(_names[helper])(_names[helper].__code__, scope, helper)
        errors: list[Exception] = []
        thread = threading.Thread(target=_harness["attempt"], args=(self._code, scope, errors))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            thread.start()
            thread.join()
        if errors:
            return Outcome(seen, str(errors[0]), _statement_of(errors[0], self.name))
        return Outcome(seen)

    def forget(self) -> None:
        """Let go of the lines."""
        linecache.cache.pop(self.name, None)


def _statement_of(error: BaseException, name: str) -> int:
    trace = error.__traceback__
    line = 0
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == name:
            line = trace.tb_lineno
        trace = trace.tb_next
    return line - 1


def accepted(program: s.Program) -> Truth | None:
    """The program without the statements that PyTorch refuses, cut off where its version check stops it.

    None where nothing is left to compare.
    """
    while True:
        program, reference = _meaningful(program)
        if not reference.seen:
            return None
        compiled = Compiled(program)
        plain = compiled.run()
        compiled.forget()
        if plain.error is None:
            return Truth(program, plain, reference.seen)
        assert plain.at is not None
        if plain.stale and isinstance(program[plain.at], s.Backward | s.Gradients):
            return Truth(program[: plain.at + 1], plain, reference.seen[: len(plain.seen) + 1])
        program = program[: plain.at] + program[plain.at + 1 :]


def _meaningful(program: s.Program) -> tuple[s.Program, Reference]:
    reference, kept = Reference(), []
    for statement in program:
        try:
            reference.run(statement)
        except NotAProgramError:
            continue
        kept.append(statement)
    return tuple(kept), reference


def watched(truth: Truth, mode: str) -> tuple[Outcome, tuple[Any, ...]]:
    """The outcome under gradsan, and what gradsan says."""
    compiled = Compiled(truth.program)
    try:
        with gradsan.watch(mode) as watch:
            outcome = compiled.run()
        return outcome, tuple(one for one in watch.diagnoses if _is_conflict(one))
    finally:
        compiled.forget()


def _is_conflict(diagnosis: Any) -> bool:
    return diagnosis.code[:3] in ("GS1", "GS2") and diagnosis.cause not in _NO_CONFLICT


def _begins(message: str | None) -> str:
    """What of a message gradsan promises: up to the shape of the tensor."""
    return (message or "").partition("]")[0]


def complaints(truths: Sequence[Truth]) -> list[list[str]]:
    """Everything in which gradsan disagrees with each truth; empty where all is well.

    gradsan is on for all of them together, since to put its wrappers into torch takes longer than a program.
    """
    found: list[list[str]] = [[] for _ in truths]
    unmeasured: set[int] = set()
    judged = [(number, truth) for number, truth in enumerate(truths) if truth.verdict != "unclear"]
    with gradsan.watch("deep"):
        for number, truth in judged:
            outcome, said = watched(truth, "deep")
            found[number] += _of_deep(truth, outcome, said)
            if any(one.silent and one.gradient.status == "unknown" for one in said):
                unmeasured.add(number)
    with gradsan.watch("heal"):
        for number, truth in judged:
            found[number] += _of_heal(truth, number in unmeasured)
    return found


def _of_deep(truth: Truth, outcome: Outcome, said: tuple[Any, ...]) -> list[str]:
    found = []
    plain = truth.plain
    if (outcome.at, outcome.stale) != (plain.at, plain.stale):
        found.append(f"deep: ends with {outcome.error!r}, plain with {plain.error!r}")
    elif _begins(outcome.error) != _begins(plain.error):
        found.append(f"deep: the message is {outcome.error!r}, plain {plain.error!r}")
    # Not to the bit: what gradsan reads of a view may make its Node earlier, and gradients are added in another order.
    if differs(outcome.seen, plain.seen) > _ROUNDING:
        found.append("deep: other gradients than without gradsan")
    errors = [one for one in said if one.severity == "error"]
    raised = any(one.gradient.status == "raised" for one in errors)
    # That it does not know whether the gradient is right is a true word of a right one, too.
    silent = any(one.silent and (truth.verdict != "right" or one.gradient.status != "unknown") for one in errors)
    # Of a backward that was stopped nobody knows what it would have computed.
    if silent != ("wrong" in truth.verdict) and not (silent and (plain.stale or _rounding_decides(truth, outcome))):
        found.append(f"deep: {'a' if silent else 'no'} silent error is told, the truth is: {truth.verdict}")
    if raised != plain.stale:
        found.append(f"deep: {'a' if raised else 'no'} raised error is told, the truth is: {truth.verdict}")
    return found


def _rounding_decides(truth: Truth, outcome: Outcome) -> bool:
    """Whether an overwritten value has changed some gradient, by no more than a rounding (one that is nearly 0)."""
    return truth.verdict == "right" and differs(outcome.seen, truth.right, smallest=0.0) > 0


def _of_heal(truth: Truth, is_unmeasured: bool) -> list[str]:
    outcome, said = watched(truth, "heal")
    found = []
    if outcome.error is not None and (outcome.stale or not truth.plain.stale):
        found.append(f"heal: ends with {outcome.error!r} in statement {outcome.at}")
    if (error := differs(outcome.seen, truth.right)) > TOLERANCE:
        found.append(f"heal: the gradients are not right, by {error:.3g}")
    if truth.verdict != "right" and not said:
        found.append(f"heal: nothing is told, the truth is: {truth.verdict}")
    serious = any(one.severity != "note" for one in said)
    if truth.verdict == "right" and serious and not is_unmeasured and not _rounding_decides(truth, truth.plain):
        found.append(f"heal: {[one.code for one in said]}, the truth is: right")
    return found
