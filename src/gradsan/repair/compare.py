"""Two runs held against each other: are the gradients the same, and does everything still get one."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count

from gradsan.repair.trial import Gradients, Recording

FIRST = 3
FIRST_TOLERANCE = 1e-5
"""Relative difference up to which the first records count as equal: rounding in float32 of another order of sums."""

TOLERANCE = 1e-3
"""The same for all records: rounding grows with the steps of a training."""

_NUMBERS_COMPARED = 20_000

Gradient = tuple[tuple[int, ...], bytes, float] | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """How the gradients of a candidate stand to those of the healed original.

    ``difference`` is the largest relative difference (Euclidean norm) of any gradient; None where nothing could be
    compared. ``lost`` counts gradients that the original has and the candidate has not (None, or all zero).
    ``is_equal`` only holds where all that the healed original computed up to its end was compared; ``has_reference``
    says that it came to its end. ``left_differs``: the steps are alike, but the parameters of an optimizer that made
    one step are left with other gradients, and the run does not show whether these are cleared before they are used.
    """

    difference: float | None
    is_equal: bool
    lost: int
    compared: int
    has_reference: bool
    left_differs: bool = False


def compare(reference: Recording, candidate: Recording) -> Comparison:
    """Compare at the optimizer steps; where neither program has an optimizer, after each backward."""
    records = reference.steps if reference.steps and candidate.steps else reference.backwards
    at_steps = records is reference.steps
    pairs = list(_pairs(records, candidate.steps if at_steps else candidate.backwards))
    expected = len(records)
    if at_steps and reference.left is not None:
        # No step tells of the gradients that the program ends with. Sharded ones lie with leaves that no graph reaches.
        expected += 1
        if candidate.left is not None and any(reference.left.values):
            pairs.append((reference.left, candidate.left))
    largest, equal, lost, met = 0.0, True, 0, 0
    for position, (right, tried) in enumerate(pairs):
        tolerance = FIRST_TOLERANCE if position < FIRST else TOLERANCE
        for before, after in _belonging(right, tried):
            met += before is not None
            if before is not None and before[2] > 0 and (after is None or after[2] == 0):
                lost += 1
            difference = _difference(before, after)
            largest = max(largest, difference)
            equal = equal and difference <= tolerance
        equal = equal and len(right.values) == len(tried.values)
    # A reference that did not come to its end does not tell what would have come.
    whole = reference.finished and len(pairs) == expected and not (reference.was_cut or candidate.was_cut)
    is_equal = bool(met) and equal and whole
    left_differs = is_equal and at_steps and _leave_others(reference, candidate)
    return Comparison(
        largest if met else None, is_equal and not left_differs, lost, len(pairs), reference.finished, left_differs
    )


def _leave_others(reference: Recording, candidate: Recording) -> bool:
    """Whether an optimizer ends with other gradients, of which neither run shows what becomes of them."""
    return any(
        _difference(before, after) > FIRST_TOLERANCE
        for right, tried in _pairs(reference.undecided, candidate.undecided)
        for before, after in zip(right.values, tried.values, strict=False)
    )


def _pairs(reference: Sequence[Gradients], candidate: Sequence[Gradients]) -> Iterator[tuple[Gradients, Gradients]]:
    """The records that belong together: the n-th of the same parameters."""
    known = dict(_numbered(reference))
    for key, tried in _numbered(candidate):
        if key in known:
            yield known[key], tried


def _belonging(right: Gradients, tried: Gradients) -> Iterator[tuple[Gradient, Gradient]]:
    """The gradients of one leaf in both records: by its label where both have it, the others in their order."""
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


def _difference(before: Gradient, after: Gradient) -> float:
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
