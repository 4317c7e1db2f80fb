"""Comparison of the losses and gradients of a compiled and an eager run, one by one, with the result as plain data."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from itertools import count
from typing import Any, Literal

from gradsan.model import Diagnosis, Message
from gradsan.repair.compare import belonging, difference, pairs
from gradsan.repair.trials.compiling import Fragment, Function
from gradsan.repair.trials.trial import Gradients, Recording

Verdict = Literal["same", "differs", "undecided", "nothing_compiled", "not_run"]

_SHOWN_IN_JSON = 100


@dataclass(frozen=True, slots=True)
class Compared:
    """The result of comparing compiled code with eager code.

    ``doubts`` are caveats for the reader: random numbers, autocast, rounding that grows. ``reasons`` say why nothing
    was compared, or what only one of the two runs did. ``stage`` is where the difference arises: ``fragment`` in a
    graph, ``write`` by a write that the graph does not notice, ``tracing`` before a backend is called, ``left_out`` in
    one function, ``together`` only in the whole program. ``findings`` are those of only one of the two runs. ``output``
    is the program's output, where it failed to start.
    """

    verdict: Verdict
    functions: tuple[Function, ...] = ()
    titles: tuple[str, ...] = ()
    backends: tuple[str, ...] = ()
    graphs: int = 0
    rounds: int = 0
    losses: int = 0
    gradients: int = 0
    parameters: int = 0
    largest: float = 0.0
    allowed: float = 0.0
    dtype: str = "float32"
    differences: tuple[Difference, ...] = ()
    stage: str = ""
    fragment: Fragment | None = None
    function: Function | None = None
    findings: tuple[Diagnosis, ...] = ()
    doubts: tuple[Message, ...] = ()
    reasons: tuple[Message, ...] = ()
    output: str = ""

    def as_json(self, say: Any) -> dict[str, Any]:
        """The object for ``json.dumps``: numbers that are not finite as None, sentences by ``say``."""
        fragment = None
        if self.fragment is not None:
            fragment = {key: one for key, one in asdict(self.fragment).items() if key not in ("program", "inputs")}
        values = {
            "verdict": self.verdict,
            "compiled": [{"file": file, "function": name} for file, name in self.functions],
            "backends": self.backends,
            "graphs": self.graphs,
            "compared": {
                "rounds": self.rounds,
                "losses": self.losses,
                "gradients": self.gradients,
                "parameters": self.parameters,
            },
            "largest": self.largest,
            "allowed": self.allowed,
            "dtype": self.dtype,
            "differences": [asdict(one) for one in self.differences[:_SHOWN_IN_JSON]],
            "stage": self.stage or None,
            "fragment": fragment,
            "function": None if self.function is None else {"file": self.function[0], "function": self.function[1]},
            "findings": [{"code": one.code, "cause": one.cause, "title": say(one.title)} for one in self.findings],
            "doubts": [say(one) for one in self.doubts],
            "reasons": [say(one) for one in self.reasons],
        }
        return {key: _finite(value) for key, value in values.items()}


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if abs(value) < float("inf") else None
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    return [_finite(one) for one in value] if isinstance(value, list | tuple) else value


_SHARE_OF_ALL = 1 / 32
"""Share of the norm of all gradients below which the rounding of one is not relative to its own norm."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A loss or the gradient of a parameter that differs, in a round counted from 1.

    ``size`` is relative, ``allowed`` the limit of rounding; ``eager`` and ``compiled`` are the losses, or the norms of
    the gradients, None for a missing gradient.
    """

    what: Literal["loss", "gradient"]
    name: str
    round: int
    size: float
    allowed: float
    eager: float | None
    compiled: float | None


@dataclass(frozen=True, slots=True)
class Judged:
    """The number of compared values, the largest relative difference, and all differences beyond rounding."""

    losses: int
    gradients: int
    parameters: int
    rounds: int
    largest: float
    allowed: float
    found: tuple[Difference, ...]

    def beyond(self, noise: Mapping[tuple[str, str, int], float], factor: float) -> tuple[Difference, ...]:
        """The differences found that exceed ``factor`` times the ``noise`` of the same number."""
        return tuple(
            one for one in self.found if not one.size <= factor * noise.get((one.what, one.name, one.round), 0.0)
        )


def judged(
    eager: Recording,
    compiled: Recording,
    names: Mapping[str, tuple[str, ...]],
    tolerance: Callable[[int], float],
) -> Judged:
    """Compare losses at each backward, and gradients at each step (where one run has none, after each backward).

    ``names`` are those of parameters by the key of their optimizer, or the label of a leaf; ``tolerance`` returns the
    allowed difference in a round counted from 0.
    """
    found: list[Difference] = []
    largest, rounds = 0.0, 0
    at_steps = bool(eager.steps and compiled.steps)
    records, others = (eager.steps, compiled.steps) if at_steps else (eager.backwards, compiled.backwards)
    together = list(zip(eager.begun, compiled.begun, strict=False))
    # Several backwards may make a round.
    a_round = max(1, round(len(eager.begun) / max(1, _most_of_a_key(records)))) if at_steps else 1
    for position, (expected, got) in enumerate(together):
        size, allowed = _of_numbers(expected, got), tolerance(position // a_round)
        largest = max(largest, size)
        if not size <= allowed:
            number = position // a_round + 1
            found.append(Difference("loss", str(position % a_round + 1), number, size, allowed, expected, got))
    counters: dict[str, count[int]] = {}
    gradients, parameters = 0, 0
    for right, tried in pairs(records, others):
        position = next(counters.setdefault(right.key, count()))
        rounds = max(rounds, position + 1)
        allowed = tolerance(position)
        both = list(belonging(right, tried))
        parameters = max(parameters, len(both))
        whole = math.sqrt(math.fsum(before[2] ** 2 for before, _ in both if before is not None))
        for name, (before, after) in zip(_named(right, names), both, strict=False):
            gradients += before is not None or after is not None
            size = difference(before, after)
            norm = 0.0 if before is None else before[2]
            if math.isinf(size) and _are_alike_unfinite(before, after):
                continue
            if before is not None and norm < whole * _SHARE_OF_ALL:
                size *= norm / (whole * _SHARE_OF_ALL) if math.isfinite(size) else 1.0
            largest = max(largest, size)
            if not size <= allowed:
                norms = (None if before is None else norm, None if after is None else after[2])
                found.append(Difference("gradient", name, position + 1, size, allowed, *norms))
    # Without gradients in ``.grad`` (torch.autograd.grad), each backward is a round.
    rounds = rounds or len(together)
    found.sort(key=lambda one: one.round)
    return Judged(len(together), gradients, parameters, rounds, largest, tolerance(0), tuple(found))


def sizes(
    eager: Recording, other: Recording, names: Mapping[str, tuple[str, ...]]
) -> dict[tuple[str, str, int], float]:
    """The difference of each loss and gradient between two eager runs; for each number the largest of its round.

    Rounding that reaches one gradient of a round reaches others of it, too.
    """
    differences = judged(eager, other, names, lambda _: -1.0).found
    found: dict[tuple[str, str, int], float] = {}
    for one in differences:
        same = [other.size for other in differences if (other.what, other.round) == (one.what, one.round)]
        finite = [size for size in same if math.isfinite(size)]
        found[one.what, one.name, one.round] = max(finite, default=0.0)
    return found


def _most_of_a_key(records: tuple[Gradients, ...]) -> int:
    keys = [one.key for one in records]
    return max((keys.count(key) for key in keys), default=0)


def _named(record: Gradients, names: Mapping[str, tuple[str, ...]]) -> list[str]:
    if record.labels:
        return [names.get(label, (label,))[0] for label in record.labels]
    known = names.get(record.key, ())
    return list(known) if len(known) == len(record.values) else [str(at) for at in range(len(record.values))]


def _of_numbers(right: float, tried: float) -> float:
    if right == tried or (math.isnan(right) and math.isnan(tried)):
        return 0.0
    size = abs(tried - right) / max(abs(right), 1e-30)
    return size if math.isfinite(size) else math.inf


def _are_alike_unfinite(before: object, after: object) -> bool:
    values = [one[2] for one in (before, after) if isinstance(one, tuple)]
    return len(values) == 2 and all(map(math.isnan, values))
