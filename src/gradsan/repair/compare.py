"""Comparison of the gradients of two runs: whether they are equal, and whether every parameter still gets one."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count

from gradsan.repair.trials.trial import Gradients, Recording

ROUNDINGS = 64
"""Units in the last place, relative to a gradient's norm, by which sums in another order may differ in the first round;
with every further round as many more."""

_ROUNDINGS_OF_ALL = 2
"""The same relative to the norm of all gradients of a step: a gradient that is nothing but rounding has no digits."""

ENOUGH = 3
"""Steps of every optimizer that make a run which was stopped before its end comparable."""

_EPSILON = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
_NUMBERS_COMPARED = 20_000

Gradient = tuple[tuple[int, ...], bytes, float] | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """The gradients of a candidate compared with those of the healed original.

    ``difference`` is the largest relative difference (Euclidean norm) of any gradient; None where nothing could be
    compared. ``lost`` counts gradients that the original has and the candidate has not (None, or all zero), of leaves
    of which that is so in half of the records or more: where a part of a loss is zero, a cut leaves nothing at times.
    ``is_equal`` only holds where everything that the healed original computed up to its end was compared, or three
    steps of every optimizer where one run was stopped before its end; ``has_reference`` says that the original reached
    its end. ``left_differs``: the steps are equal, but the parameters of an optimizer that made one step end with other
    gradients, and the run does not show whether these are cleared before they are used. ``is_alike``: everything
    compared is equal, however far both runs got. ``mistaken`` counts gradients of a first step that are another
    optimizer's of the original, in place of its own.
    """

    difference: float | None
    is_equal: bool
    lost: int
    compared: int
    has_reference: bool
    left_differs: bool = False
    is_alike: bool = False
    mistaken: int = 0


def tolerance(dtype: str, position: int = 0) -> float:
    """Relative difference of numbers of ``dtype`` that rounding explains, in the round ``position`` (from 0)."""
    return ROUNDINGS * _EPSILON.get(dtype, _EPSILON["float32"]) * (1 + position)


def compare(reference: Recording, candidate: Recording) -> Comparison:
    """Compare at the optimizer steps; where neither program has an optimizer, after each backward."""
    records = reference.steps if reference.steps and candidate.steps else reference.backwards
    at_steps = records is reference.steps
    others = candidate.steps if at_steps else candidate.backwards
    found = list(pairs(records, others))
    was_ended = reference.was_ended or candidate.was_ended
    is_whole = _is_enough(records, others) if was_ended else len(found) == len(records)
    together = [(position, right, tried) for position, (right, tried) in enumerate(found)]
    if at_steps and reference.left is not None and not was_ended:
        # No step shows the gradients that the program ends with. Sharded ones belong to leaves that no graph reaches.
        is_whole = is_whole and candidate.left is not None and any(reference.left.values)
        if candidate.left is not None and any(reference.left.values):
            together.append((len(together), reference.left, candidate.left))
    largest, equal, met = 0.0, True, 0
    lost, had = Counter[tuple[str, int]](), Counter[tuple[str, int]]()
    dtype = max(reference.dtype, candidate.dtype, key=lambda name: _EPSILON.get(name, 0.0))
    for position, right, tried in together:
        allowed = tolerance(dtype, position)
        both = list(belonging(right, tried))
        whole = math.sqrt(math.fsum(before[2] ** 2 for before, _ in both if before is not None))
        for leaf, (before, after) in enumerate(both):
            met += before is not None
            if before is not None and before[2] > allowed * whole / ROUNDINGS:
                had[right.key, leaf] += 1
                lost[right.key, leaf] += after is None or after[2] == 0
            apart = difference(before, after)
            if before is not None and apart * before[2] <= allowed * whole * _ROUNDINGS_OF_ALL / ROUNDINGS:
                continue
            largest = max(largest, apart)
            equal = equal and apart <= allowed
        equal = equal and len(right.values) == len(tried.values)
    # A reference that did not reach its end does not show what would have followed.
    whole_run = reference.finished and is_whole and not (reference.was_cut or candidate.was_cut)
    is_equal = bool(met) and equal and whole_run
    left_differs = is_equal and at_steps and _leave_others(reference, candidate)
    return Comparison(
        largest if met else None,
        is_equal and not left_differs,
        sum(times for leaf, times in lost.items() if times * 2 >= had[leaf]),
        len(together),
        reference.finished,
        left_differs,
        bool(met) and equal and len(found) == len(records),
        0 if is_equal else _mistaken(reference.steps, candidate.steps),
    )


def _mistaken(reference: Sequence[Gradients], candidate: Sequence[Gradients]) -> int:
    """How many gradients an optimizer's first step takes that the original gives to another one, its own being lost.

    Those of a parameter that two optimizers train, where a step was moved past a backward and a ``zero_grad()``.
    """
    first = {record.key: record for record in reversed(reference)}
    count = 0
    for record in {one.key: one for one in reversed(candidate)}.values():
        own = first.get(record.key)
        others = {value[:2] for key, other in first.items() if key != record.key for value in other.values if value}
        for before, after in belonging(own, record) if own is not None else ():
            is_other = after is not None and after[2] > 0 and after[:2] in others
            count += is_other and before is not None and before[2] > 0 and before[:2] != (after or ())[:2]
    return count


def _is_enough(records: Sequence[Gradients], others: Sequence[Gradients]) -> bool:
    """Whether enough records of each key were made in both runs to compare a training, or all that one run has."""
    first, second = ([record.key for record in one] for one in (records, others))
    return all(
        min(first.count(key), second.count(key)) >= min(ENOUGH, max(first.count(key), second.count(key)))
        for key in {*first, *second}
    )


def _leave_others(reference: Recording, candidate: Recording) -> bool:
    """Whether an optimizer ends with other gradients, and neither run shows whether they are used."""
    return any(
        difference(before, after) > tolerance(reference.dtype)
        for right, tried in pairs(reference.undecided, candidate.undecided)
        for before, after in zip(right.values, tried.values, strict=False)
    )


def pairs(reference: Sequence[Gradients], candidate: Sequence[Gradients]) -> Iterator[tuple[Gradients, Gradients]]:
    """The corresponding records of both runs: the n-th of the same parameters."""
    known = dict(_numbered(reference))
    for key, tried in _numbered(candidate):
        if key in known:
            yield known[key], tried


def belonging(right: Gradients, tried: Gradients) -> Iterator[tuple[Gradient, Gradient]]:
    """The gradients of one leaf in both records: matched by label where both have it, the others in order."""
    if not right.labels or not tried.labels:
        yield from zip(right.values, tried.values, strict=False)
        return
    known = dict(zip(tried.labels, tried.values, strict=True))
    shared = known.keys() & set(right.labels)
    rest = iter([value for label, value in known.items() if label not in shared])
    for label, value in zip(right.labels, right.values, strict=True):
        yield value, known[label] if label in shared else next(rest, None)


def _numbered(records: Sequence[Gradients]) -> Iterator[tuple[tuple[str, int], Gradients]]:
    counters: dict[str, count[int]] = {}
    for record in records:
        yield (record.key, next(counters.setdefault(record.key, count()))), record


def difference(before: Gradient, after: Gradient) -> float:
    """The Euclidean norm of the difference, relative to that of ``before``; infinite for different shapes."""
    if before is None and after is None:
        return 0.0
    if before is None or not isinstance(after, tuple):
        other = before if before is not None else after
        return 0.0 if isinstance(other, tuple) and other[2] == 0 else math.inf
    if before[0] != after[0]:
        return math.inf
    if before[1] == after[1]:
        return 0.0
    right, tried = array("d", before[1]), array("d", after[1])
    stride = max(1, len(right) // _NUMBERS_COMPARED)
    gap = math.fsum((a - b) ** 2 for a, b in zip(right[::stride], tried[::stride], strict=True))
    size = math.fsum(a * a for a in right[::stride])
    if math.isnan(gap):
        return math.inf
    return math.sqrt(gap / size) if size else (math.inf if gap else 0.0)
