"""Comparison of two runs up to the first nonfinite value, and only of values finite in the first."""

from __future__ import annotations

import math
import re
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from gradsan.repair.trials.trial import Gradients, Moment, Recording, Trial, Value

_ABOUT_VALUES = re.compile(r"\b(nan|inf|infinite|finite)\b", re.IGNORECASE)

_Gradient = tuple[tuple[int, ...], bytes, float] | None


@dataclass(frozen=True, slots=True)
class FiniteParts:
    """Two recordings that end with the round in which the first became nonfinite, with zeros for nonfinite values.

    ``has_numbers``: a loss or a gradient that was finite is left to compare.
    """

    reference: Recording
    candidate: Recording
    has_numbers: bool


def is_nonfinite(trial: Trial) -> bool:
    """Whether a run had a loss, a gradient or a parameter that was not finite, or ended with an error that says so."""
    recording = trial.recording
    said = trial.failed_by or recording.exception
    return (
        not all(map(math.isfinite, recording.begun))
        or any(not _is_finite(one) for one in (*recording.steps, *recording.backwards))
        or any(not _sums_are_finite(value) for one in recording.parameters for value in one.values)
        or (said is not None and _ABOUT_VALUES.search(said[1]) is not None)
    )


def finite_parts(reference: Recording, candidate: Recording) -> FiniteParts:
    """Both recordings up to the end of the first's finite part."""
    step, backward = _first_bad(reference)
    if backward is not None and not all(map(math.isfinite, reference.begun[: backward + 1])):
        # In a round whose loss was not finite no gradient is meaningful.
        step, backward = None if step is None else step - 1, backward - 1
    steps, others = _cut(reference.steps, candidate.steps, step)
    backwards, other_backwards = _cut(reference.backwards, candidate.backwards, backward)
    steps, others = _masked(steps, others)
    backwards, other_backwards = _masked(backwards, other_backwards)
    begun = reference.begun[: next((i for i, one in enumerate(reference.begun) if not math.isfinite(one)), None)]
    begun = begun[: None if backward is None else backward + 1]
    moments, other_moments = _moments(reference.moments, candidate.moments, backward)
    right = replace(
        _ended(reference),
        steps=steps,
        backwards=backwards,
        begun=begun,
        losses=begun,
        moments=moments,
        finished=True,
        parameters=reference.parameters[: None if step is None else max(step, 0)],
    )
    tried = replace(
        _ended(candidate),
        steps=others,
        backwards=other_backwards,
        begun=candidate.begun[: len(begun)],
        losses=candidate.begun[: len(begun)],
        moments=other_moments,
    )
    has_numbers = bool(begun) or any(
        value is not None and value[2] for one in (*steps, *backwards) for value in one.values
    )
    return FiniteParts(right, tried, has_numbers)


def _ended(recording: Recording) -> Recording:
    """The recording without the state that a run leaves at its end."""
    return replace(recording, left=None, undecided=(), was_ended=True, exception=None)


def _first_bad(recording: Recording) -> tuple[int | None, int | None]:
    """Number of the first step and of the first backward with a value that is not finite; None where there is none."""
    steps = [number for number, one in enumerate(recording.steps) if not _is_finite(one)]
    steps += [
        number
        for number, one in enumerate(recording.parameters)
        if not all(_sums_are_finite(value) for value in one.values)
    ]
    backwards = [number for number, one in enumerate(recording.backwards) if not _is_finite(one)]
    backwards += [number for number, loss in enumerate(recording.begun) if not math.isfinite(loss)]
    return min(steps, default=None), min(backwards, default=None)


def _is_finite(one: Gradients) -> bool:
    return all(value is None or math.isfinite(value[2]) for value in one.values)


def _sums_are_finite(value: Value) -> bool:
    return all(map(math.isfinite, array("d", value.sums)))


def _cut(
    reference: Sequence[Gradients], candidate: Sequence[Gradients], last: int | None
) -> tuple[tuple[Gradients, ...], tuple[Gradients, ...]]:
    """The records up to number ``last``, and as many of each key of the candidate's."""
    if last is None:
        return tuple(reference), tuple(candidate)
    right = tuple(reference[: last + 1])
    columns = Counter(one.key for one in right)
    tried: list[Gradients] = []
    for one in candidate:
        if columns[one.key] > 0:
            columns[one.key] -= 1
            tried.append(one)
    return right, tuple(tried)


def _masked(
    reference: Sequence[Gradients], candidate: Sequence[Gradients]
) -> tuple[tuple[Gradients, ...], tuple[Gradients, ...]]:
    """Both with zeros wherever the first is not finite."""
    right, tried = list(reference), list(candidate)
    places: dict[tuple[str, int], int] = {}
    met: Counter[str] = Counter()
    for position, one in enumerate(candidate):
        places[one.key, met[one.key]] = position
        met[one.key] += 1
    met.clear()
    for number, one in enumerate(reference):
        place = places.get((one.key, met[one.key]))
        met[one.key] += 1
        if _is_finite(one):
            continue
        other = None if place is None else tried[place]
        values, counterparts = list(one.values), [] if other is None else list(other.values)
        for at, value in enumerate(one.values):
            if value is not None and not math.isfinite(value[2]):
                where = _counterpart(one, other, at)
                paired = None if where is None else counterparts[where]
                values[at], changed = _without_bad(value, paired)
                if where is not None:
                    counterparts[where] = changed
        right[number] = replace(one, values=tuple(values))
        if place is not None and other is not None:
            tried[place] = replace(other, values=tuple(counterparts))
    return tuple(right), tuple(tried)


def _counterpart(one: Gradients, other: Gradients | None, at: int) -> int | None:
    if other is None:
        return None
    if one.labels and other.labels:
        return other.labels.index(one.labels[at]) if one.labels[at] in other.labels else None
    return at if at < len(other.values) else None


def _without_bad(value: tuple[tuple[int, ...], bytes, float], other: _Gradient) -> tuple[_Gradient, _Gradient]:
    numbers = array("d", value[1])
    bad = [at for at, number in enumerate(numbers) if not math.isfinite(number)]
    changed = _zeroed(value, bad)
    if other is None or len(other[1]) != len(value[1]):
        # A gradient without a finite element cannot be lost.
        return (changed if changed[2] else None), other
    return changed, _zeroed(other, bad)


def _zeroed(value: tuple[tuple[int, ...], bytes, float], places: list[int]) -> tuple[tuple[int, ...], bytes, float]:
    numbers = array("d", value[1])
    for at in places:
        numbers[at] = 0.0
    return value[0], numbers.tobytes(), math.sqrt(math.fsum(number * number for number in numbers))


def _moments(
    reference: Sequence[Moment], candidate: Sequence[Moment], backward: int | None
) -> tuple[tuple[Moment, ...], tuple[Moment, ...]]:
    """The moments up to the backward that was affected first, with the numbers that were finite."""
    last = math.inf if backward is None else backward + 1
    right = [one for one in reference if one.begun <= last and (backward is None or not one.is_end)]
    others = {(one.steps, one.ordinal, one.is_end): one for one in candidate}
    left: list[Moment] = []
    tried: list[Moment] = []
    for one in right:
        other = others.get((one.steps, one.ordinal, one.is_end))
        if other is None:
            left.append(one)
            continue
        values, counterparts = dict(one.values), dict(other.values)
        for name, value in one.values.items():
            if not _sums_are_finite(value):
                values[name], changed = _without_bad_sums(value, counterparts.get(name))
                if changed is not None:
                    counterparts[name] = changed
        left.append(replace(one, values=values))
        tried.append(replace(other, values=counterparts))
    return tuple(left), tuple(tried)


def _without_bad_sums(value: Value, other: Value | None) -> tuple[Value, Value | None]:
    sums = array("d", value.sums)
    bad = [at for at, number in enumerate(sums) if not math.isfinite(number)]
    others = None if other is None or len(other.sums) != len(value.sums) else array("d", other.sums)
    for at in bad:
        # A part has two sums, of its elements and of their absolute values.
        for place in (at - at % 2, at - at % 2 + 1):
            sums[place] = 0.0
            if others is not None:
                others[place] = 0.0
    changed = None if other is None or others is None else replace(other, sums=others.tobytes())
    return replace(value, sums=sums.tobytes(), checksum=0), changed
