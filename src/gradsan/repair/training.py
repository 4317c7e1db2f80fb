"""Comparison of two runs beyond their gradients: parameters, kept values, random draws, printed numbers."""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from gradsan.repair.compare import tolerance
from gradsan.repair.trials.trial import Moment, Recording, Value

_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
"""Buffers that a layer itself writes whenever its forward runs."""
_ANY_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_NUMBER = re.compile(_ANY_NUMBER)
_CLOCK = re.compile(
    r"(?:\d{4}-\d\d-\d\d[T ])?\b\d{1,2}:\d\d(?::\d\d(?:[.,]\d+)?)?\b"
    rf"|(?:\d+\s?m(?:in)?\s?)?{_ANY_NUMBER}(?:[mun\u00b5]?s|min|\s?(?:secs?|seconds?|minutes?|hours?|\w+/s(?:ec)?|s/\w+))\b"
    rf"|{_ANY_NUMBER} [mun\u00b5]?s(?=[)\],;]|$)"
    rf"|\b(?:time|elapsed|took|duration|eta)\b\W{{0,4}}{_ANY_NUMBER}",
    re.IGNORECASE | re.MULTILINE,
)
"""A date, a duration or a speed. Coarsely rounded, it may be equal in two runs and differ in a third."""
_ELEMENT = re.compile(r"\[\d+\]")
_MOST_NAMES = 8


@dataclass(frozen=True, slots=True)
class Training:
    """The differences of a candidate's training from that of the healed original; names are expressions of the program.

    ``frozen``: changes in the original and no longer in the candidate, and lives on in the next round. ``kept``: is
    kept from round to round, and differs. ``passing``: differs, and is a local variable, or a layer's own
    counter. ``drawn``: drawn more often. ``overwritten``: holds a gradient by reference that a later backward writes
    into. ``numbers``: those of ``loss``, ``random numbers``, printed numbers and files that differ. ``parameters``:
    whether they do after any step.
    """

    frozen: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    passing: tuple[str, ...] = ()
    drawn: tuple[str, ...] = ()
    overwritten: tuple[str, ...] = ()
    numbers: tuple[str, ...] = ()
    parameters: bool = False

    @property
    def differs_in(self) -> tuple[str, ...]:
        """All differences by name, the most important first."""
        parameters = ("parameters",) if self.parameters else ()
        names = (*parameters, *self.kept, *self.frozen, *self.numbers, *self.drawn, *self.passing)
        return tuple(dict.fromkeys(names))

    def without(self, noise: frozenset[str]) -> Training:
        """The same without the differences that two runs of the original have, too."""

        def rest(names: tuple[str, ...]) -> tuple[str, ...]:
            return tuple(name for name in names if name not in noise)

        return Training(
            rest(self.frozen),
            rest(self.kept),
            rest(self.passing),
            self.drawn,
            self.overwritten,
            rest(self.numbers),
            self.parameters and "parameters" not in noise,
        )


def compare_trainings(reference: Recording, candidate: Recording, *texts: Mapping[str, str]) -> Training:
    """Compare ``candidate`` with ``reference``, and the ``texts`` of both by name, where both have got equally far."""
    kept: list[str] = []
    passing: list[str] = []
    decided_later: list[str] = []
    drawn: set[str] = set()
    numbers: list[str] = []
    pairs = list(_together(reference, candidate))
    # Within a round the same writes may happen earlier or later; at its end all are done.
    ends = [one.values for one in pairs[-1]] if _have_ended(pairs) else []
    at_end = frozenset(ends[0]) & frozenset(ends[1]) if ends else frozenset()
    # The same memory may have had another name in a function that has returned.
    left = {ends[0][name].memory for name in at_end} - {0}
    # The final values of a program without rounds are not used again: a difference is reported, and costs nothing.
    has_rounds = sum(not right.is_end for right, _ in pairs) > 1
    parameters = _parameters_differ(reference, candidate)
    # Values that are equal after every step may be written before or after a backward.
    stepped = set() if parameters else {value.memory for one in reference.parameters for value in one.values} - {0}
    trained = {value.memory for one in reference.parameters for value in one.values} - {0}
    for position, (right, tried) in enumerate(pairs):
        # Where a round has fewer steps than before, only the end corresponds in both.
        if right.is_end or (not _have_ended(pairs) and right.begun == tried.begun):
            drawn.update(kind for kind, many in tried.drawn.items() if many > right.drawn.get(kind, 0))
            if right.random != tried.random:
                numbers.append("random numbers")
        for name, value in right.values.items():
            other = tried.values.get(name)
            if other is None or value.standing == other.standing == "graph" or _alike(value, other, position):
                continue
            if not right.is_end and (name in at_end or value.memory in left | stepped):
                decided_later.append(name)
                continue
            if _is_setting(name, reference, candidate) or (has_rounds and _is_unread(name, right)):
                continue
            if _is_nobodys_gradient(name, reference.moments, trained):
                continue
            is_kept = has_rounds and name not in right.passing and _is_kept(name, value, reference.moments)
            is_kept = is_kept and not _comes_later(name, other, pairs[: position if not right.is_end else 0])
            (kept if is_kept else passing).append(name)
    lasting: dict[str, list[str]] = {}
    for name in dict.fromkeys([*kept, *passing, *decided_later]) if has_rounds else ():
        if not any(name in right.passing for right, _ in pairs):
            lasting.setdefault(_ELEMENT.sub("[]", name), []).append(name)
    # One element of a list may be equal by chance (an action); a write that no longer happens leaves all of them.
    moving = {_ELEMENT.sub("[]", name) for name in _moving_numbers(candidate.moments) if "[" in name}
    frozen = [
        name
        for group, names in lasting.items()
        if group not in moving and all(_is_frozen(one, pairs) for one in names)
        for name in names
    ]
    if len(reference.begun) == len(candidate.begun) and not _near(reference.begun, candidate.begun, reference.dtype):
        numbers.append("loss")
    either_ended = reference.was_ended or candidate.was_ended
    for name in texts[0] if texts else ():
        if name in texts[1] and _print_others(*(one[name] for one in texts), either_ended=either_ended):
            numbers.append(name)
    return Training(
        _shown(frozen),
        _shown(kept),
        _shown(passing),
        tuple(sorted(drawn)),
        _shown(sorted(candidate.overwritten - reference.overwritten)),
        tuple(dict.fromkeys(numbers)),
        parameters,
    )


def _together(reference: Recording, candidate: Recording) -> Iterator[tuple[Moment, Moment]]:
    """The moments at which every optimizer has made equally many steps in both; else the n-th backwards."""
    others = {(one.steps, one.ordinal): one for one in candidate.moments if not one.is_end}
    mine = [one for one in reference.moments if not one.is_end]
    has_steps = bool(reference.steps or candidate.steps)
    is_alike = len(mine) == len(others)
    for right in mine:
        tried = others.get((right.steps, right.ordinal))
        if tried is not None and (is_alike or right.ordinal == 0 if has_steps else is_alike or not right.ordinal):
            yield right, tried
    ends = [next((one for one in run.moments if one.is_end), None) for run in (reference, candidate)]
    if ends[0] is None or ends[1] is None:
        return
    # Where the limit has ended a run, its end is an arbitrary position: a moved step is reached after more backwards.
    is_as_far = (ends[0].steps, ends[0].begun) == (ends[1].steps, ends[1].begun)
    if is_as_far or not (reference.was_ended or candidate.was_ended):
        yield ends[0], ends[1]


def _have_ended(pairs: list[tuple[Moment, Moment]]) -> bool:
    return bool(pairs) and pairs[-1][0].is_end


def _comes_later(name: str, value: Value, before: list[tuple[Moment, Moment]]) -> bool:
    """Whether ``value`` is the original's of a moment ago: it may catch up within the round."""
    earlier = before[-1][0].values.get(name) if before else None
    return earlier is not None and _alike(earlier, value, len(before))


def _is_kept(name: str, value: Value, moments: Sequence[Moment]) -> bool:
    """Whether it is carried into the next round: an attribute, an element, a count, persistent memory.

    Not the statistics that a layer gathers by itself.
    """
    path = name.partition(": ")[2]
    if path.rpartition(".")[2] in _STATISTICS:
        return False
    return "." in path or "[" in path or value.dtype == "int" or _stays(name, moments)


def _is_unread(name: str, moment: Moment) -> bool:
    """Whether nothing reads it any more: the next round binds the variable anew, and what came of it is compared."""
    is_variable = not {".", "["} & set(name.partition(": ")[2])
    return is_variable and name in moment.passing


def _is_nobodys_gradient(name: str, moments: Sequence[Moment], trained: set[int]) -> bool:
    """Whether it is a gradient of a network that changes, none of which an optimizer of the program has: a teacher.

    Without a change, an update by hand that reads the gradient may still come; with one, its result would differ.
    """
    owner = name.removesuffix(".grad") if name.endswith(".grad") else ""
    network = owner.rsplit(".", 2)[0]
    if not trained or owner.count(".") < 2 or not moments:
        return False
    parts = [one for one in moments[0].values if one.startswith(f"{network}.") and not one.endswith(".grad")]
    values = {one: [at.values[one] for at in moments if one in at.values] for one in parts}
    is_own = not any(one.memory in trained for found in values.values() for one in found)
    return is_own and owner in values and any(len({one.checksum for one in found}) > 1 for found in values.values())


def _is_setting(name: str, *runs: Recording) -> bool:
    """Whether it is an object's flag that neither run changes (``inplace``): text of the program, not training."""
    values = [one.values[name] for run in runs for one in run.moments if name in one.values]
    return (
        "." in name
        and all(one.dtype == "bool" and not one.shape for one in values)
        and all(len({one.values[name].checksum for one in run.moments if name in one.values}) == 1 for run in runs)
    )


def _stays(name: str, moments: Sequence[Moment]) -> bool:
    values = [one.values[name] for one in moments if name in one.values]
    memories, contents = ({getattr(one, field) for one in values} for field in ("memory", "checksum"))
    return len(memories) == 1 and 0 not in memories and len(contents) > 1 and values[0].standing == "plain"


def _is_frozen(name: str, pairs: list[tuple[Moment, Moment]]) -> bool:
    values = [
        (right.values[name], tried.values[name]) for right, tried in pairs if name in right.values.keys() & tried.values
    ]
    if len(values) < 2:
        return False
    (before, other), (after, left) = values[0], values[-1]
    moved = before.checksum != after.checksum or before.shape != after.shape
    return moved and other.checksum == left.checksum and all(left.checksum == one.checksum for _, one in values)


def _moving_numbers(moments: Sequence[Moment]) -> Iterator[str]:
    """The plain numbers that change from moment to moment, those that are equal in both runs among them."""
    first: dict[str, Value] = {}
    for one in moments:
        for name, value in one.values.items():
            if not value.memory and first.setdefault(name, value).checksum != value.checksum:
                yield name


def _alike(value: Value, other: Value, position: int) -> bool:
    if value.checksum == other.checksum and value.shape == other.shape:
        return True
    if value.shape != other.shape:
        return False
    dtype = "float32" if value.dtype == "float" else value.dtype
    if dtype.startswith(("int", "uint", "bool")):
        return False
    allowed = tolerance(dtype, position)
    right, tried = array("d", value.sums), array("d", other.sums)
    return len(right) == len(tried) and all(
        abs(right[i] - tried[i]) <= allowed * max(right[i + 1], tried[i + 1]) for i in range(0, len(right), 2)
    )


def _parameters_differ(reference: Recording, candidate: Recording) -> bool:
    unmoved = _without_gradient(reference)
    met: dict[str, int] = {}
    known: dict[tuple[str, int], tuple[Value, ...]] = {}
    for one in reference.parameters:
        known[one.key, met.get(one.key, 0)] = one.values
        met[one.key] = met.get(one.key, 0) + 1
    met.clear()
    for one in candidate.parameters:
        number = met.get(one.key, 0)
        met[one.key] = number + 1
        values = known.get((one.key, number))
        pairs = enumerate(zip(values or (), one.values, strict=False))
        if not all(_alike(a, b, number) for place, (a, b) in pairs if (one.key, place) not in unmoved):
            return True
    return False


def _without_gradient(recording: Recording) -> set[tuple[str, int]]:
    """The places of parameters whose gradients are rounding alone, in every step: the bias of an attention's keys.

    Adam divides by their size, and moves them as far as any other.
    """
    found: set[tuple[str, int]] = set()
    moved: set[tuple[str, int]] = set()
    for step in recording.steps:
        norms = [0.0 if one is None else one[2] for one in step.values]
        least = tolerance(recording.dtype) * math.sqrt(math.fsum(one**2 for one in norms))
        for place, norm in enumerate(norms):
            (moved if norm > least else found).add((step.key, place))
    return found - moved


def _near(first: tuple[float, ...], second: tuple[float, ...], dtype: str) -> bool:
    # A backward moved before another one changes no loss.
    pairs = zip(*(sorted(one, key=lambda loss: (math.isnan(loss), loss)) for one in (first, second)), strict=True)
    return all(
        math.isclose(a, b, rel_tol=tolerance(dtype, position), abs_tol=1e-9) or (math.isnan(a) and math.isnan(b))
        for position, (a, b) in enumerate(pairs)
    )


def _print_others(right: str, tried: str, *, either_ended: bool) -> bool:
    """Whether printed numbers other than times differ; of a run that was ended early, among those that it printed."""
    first, second = (_NUMBER.findall(_CLOCK.sub(" ", one)) for one in (right, tried))
    if not either_ended and len(first) != len(second):
        return True
    return not all(_reads_alike(a, b) for a, b in zip(first, second, strict=False))


def _reads_alike(first: str, second: str) -> bool:
    if first == second:
        return True
    if not any(mark in first + second for mark in ".eE"):
        return False
    # The last printed digit may be rounded the other way.
    digits = len(first.partition(".")[2].split("e")[0].split("E")[0])
    unit = 10.0**-digits if "e" not in first.lower() else 0.0
    return math.isclose(float(first), float(second), rel_tol=1e-5, abs_tol=1.01 * unit)


def _shown(names: list[str]) -> tuple[str, ...]:
    """Expressions as the program has them, without the functions that contain them."""
    return tuple(dict.fromkeys(name.partition(": ")[2] for name in names))[:_MOST_NAMES]
