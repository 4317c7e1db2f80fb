"""Data scaled in place again in every epoch: ``x = x.float(); x /= 255``, where ``float()`` has copied nothing.

Read from the log of writes in the 16th, 64th, 256th … round and at the end: memory that only the same few lines or
calls write, each part of it again and again, one by a factor or a function such as the logarithm, the others perhaps
by a shift, which is a number in the source where it comes last, or by a bound. A version counter without gaps shows
that it is the same memory, and that nobody else refills it. The source must show that the line, or the caller of its
function, treats it as its own: the result of a conversion, or an element of something larger; what a data loader's
code returns is its own. An update of elements, ``boxes[:, [0, 2]] /= width``, is an assignment to PyTorch. Scaling by
the value's own statistics is harmless the second time; a shift by them with scaling by a number is not. A state that
accumulates and decays, such as a running mean or a trace, is written again on purpose: it is added to, or has a factor
near one; none is shifted by a number batch by batch. What an optimizer's step scales is its state. Whether any other
factor scales data is unknown, unless a data loader calls the line.

Code called by a data loader keeps no state in the data: there a shift alone is reported, too, as accumulating noise,
and elements chosen at random that a constant overwrites in what the code returns, or elsewhere in a second name.
Elsewhere it is if it adds random numbers alone to parts of one memory in turn, or multiplies them by such, which the
program has not copied before, and goes on with the result of the call. Otherwise a memory may be a state that drifts,
such as particles: a note.

And rows of an expanded tensor, which are one row in memory: PyTorch refuses to write all of them, but not one.

Row: ``rows_are_one``. Role ``written`` (``name``; ``op``; ``values``: ``shape``, ``dtype``, ``device``, ``rows``).
Row: ``data_changed_again``. Roles: ``changed`` (a line; ``name`` is the written value, ``op`` the operation;
``values``: ``shape``, ``dtype``, ``device``, ``times``, ``parts``, ``is_factor``, whether it is multiplied by something
else than a number in the source, ``is_shifted``, whether nothing scales it, ``is_drift``, whether it may be a state).
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Hashable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

from gradsan import _torch, source
from gradsan.model import Clue, Frame, Site
from gradsan.record.detector import Finder, Run
from gradsan.record.log import RawStack, RawWrite, backward_calls, logged_writes
from gradsan.record.stacks import is_user_file, symbolise
from gradsan.record.steps import RawBackward

ROW, ROWS = "data_changed_again", "rows_are_one"
_BENDS = frozenset({"log_", "log1p_", "log2_", "log10_", "sqrt_", "pow_", "square_", "exp_", "expm1_"})
SCALES = _BENDS | {"mul_", "div_", "__imul__", "__itruediv__", "true_divide_", "multiply_", "divide_"}
FACTORS = frozenset({"mul_", "__imul__", "multiply_"})
_ADDS = frozenset({"add_", "__iadd__"})
_KINDS = {
    "add": frozenset({"add_", "__iadd__"}),
    "sub": frozenset({"sub_", "__isub__", "subtract_"}),
    "mul": FACTORS,
    "div": frozenset({"div_", "__itruediv__", "true_divide_", "divide_"}),
}
_INVERSE = {"add": "sub", "sub": "add", "mul": "div", "div": "mul"}
FADES = 0.5
SHIFTS = frozenset({"add_", "sub_", "__iadd__", "__isub__", "subtract_"})
_BOUNDS = frozenset({"clamp_", "clamp_min_", "clamp_max_", "clip_", "abs_", "nan_to_num_", "neg_", "round_"})
"""Operations that alone scale nothing; ``neg_`` and ``abs_`` are parts of a longer change."""
_SETS = frozenset({"__setitem__", "masked_fill_", "index_fill_"})
_LINES, _TIMES_ALONE, _EQUAL = 4, 3, 1e-6


class _Part(NamedTuple):
    """A part of some memory, and how often the lines at ``stacks`` wrote it, by ``ops``; ``last`` is the last write."""

    stacks: tuple[Any, ...]
    ops: tuple[str, ...]
    times: int
    last: RawWrite


class ChangedAgain(Finder):
    """Reads the log of writes in some rounds; findings go to ``found``."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._steps, self._since, self._looked_at = run.steps, 0, 0
        self._stacks, self._places = self._notes(dict[Hashable, Any]()), self._notes(dict[Hashable, Any]())
        self._noise = self._notes(dict[Hashable, bool]())
        self._updates = self._notes(dict[Hashable, str]())
        self._told = self._notes(set[int]())

    def forget(self) -> None:
        self._since, self._looked_at = self._core.clock, 0
        super().forget()

    def before_round(self, entry: RawBackward, rounds: int) -> None:
        # A program of many lines that call backward would read the whole log for each of them.
        if rounds >= 16 and rounds.bit_length() % 2 and self._core.write_count >= 2 * self._looked_at:
            self._looked_at = self._core.write_count
            self._look(entry.stack)

    def settle(self) -> None:
        """Check a last time, as watching ends."""
        calls = list(backward_calls(self._core))
        if len(calls) > 1:
            self._look(calls[-1].stack)
        if calls:
            self._look_for_expanded(calls[-1].stack)

    def _look_for_expanded(self, used: Any) -> None:
        """Report the writes of one row of several that are the same memory."""
        for raw in logged_writes(self._core, self._since):
            if raw.op != "__setitem__" or not raw.item or raw.stack in self._described:
                continue
            rows = _rows_written(raw)
            if rows and (frame := (site := symbolise(raw.stack)).user_frame) is not None:
                self._described.add(raw.stack)
                name = source.written_expression(frame, raw.op, ())
                values = {"shape": raw.shape, "dtype": "?", "device": "?", "rows": rows}
                self._report_at(ROWS, used, Clue("written", site, name=name, op=raw.op, values=values))

    def _look(self, used: Any) -> None:
        groups: dict[tuple[Any, ...], list[_Part]] = {}
        for raws in self._memories():
            for part in _parts(raws, self._may_pile_up):
                groups.setdefault(part.stacks, []).append(part)
        for stacks, parts in groups.items():
            memory = {part.last.storage for part in parts}
            is_new, clock = stacks not in self._described and self._told.isdisjoint(memory), parts[0].last.clock
            if is_new and not any(one.clock < clock <= (one.end or clock) for one in self._steps.steps):
                self._judge(used, stacks, parts)
                self._told |= memory if stacks in self._described else set()

    def _memories(self) -> Iterator[list[RawWrite]]:
        """Yield the last writes to each scaled memory, as far as the counter shows that there were no others."""
        raws = [self._as_update(raw) for raw in logged_writes(self._core, self._since) if raw.kind != "metadata"]
        scaled = {raw.storage for raw in raws if not raw.is_parameter and (raw.op in SCALES or self._may_pile_up(raw))}
        began = next((call.clock for call in backward_calls(self._core)), 0)
        in_training = {raw.stack for raw in raws if raw.clock > began}
        found: dict[int, list[RawWrite]] = {}
        for raw in raws:
            # What makes the data in place before training is no part of the rounds.
            if raw.storage in scaled and (raw.clock > began or raw.stack in in_training):
                known = found.setdefault(raw.storage, [])
                if known and (raw.version is None or raw.version - 1 != known[-1].version):
                    known.clear()
                # ``x[:2] *= 3`` writes the view, and then assigns it to itself.
                is_update = self._updates.get(raw.stack, "__setitem__") != "__setitem__"
                is_after_view = is_update and bool(known) and known[-1].stack not in self._updates
                if is_after_view and _is_same_line(known[-1].stack, raw.stack):
                    known[-1] = known[-1]._replace(version=raw.version)
                    continue
                known.append(raw._replace(stack=self._stack_of_place(raw.stack)))
        for known in found.values():
            loaded = any(is_loaded(raw.stack) for raw in known)
            if loaded and any(raw.op in _SETS and not is_loaded(raw.stack) for raw in known):
                # The training puts elements in, which a data loader returns: a memory bank.
                continue
            if len(known) > 1 and all(raw.op in SCALES | SHIFTS | _BOUNDS | _SETS for raw in known):
                yield known

    def _as_update(self, raw: RawWrite) -> RawWrite:
        """The write as an update, where the source of an assignment to elements has one: ``x[:, [0, 2]] /= 2``."""
        if raw.op != "__setitem__":
            return raw
        if raw.stack not in self._updates:
            place = symbolise(raw.stack).user_frame
            self._updates[raw.stack] = (None if place is None else source.elements_updated_by(place)) or raw.op
        return raw._replace(op=self._updates[raw.stack])

    def _may_pile_up(self, raw: RawWrite) -> bool:
        """Whether a write that scales nothing would be reported: a data loader calls it, or it adds noise."""
        if raw.op in SHIFTS | _SETS and raw.stack not in self._noise:
            is_sum = raw.op in SHIFTS
            is_own = is_loaded(raw.stack) or (not is_sum and _is_of_copy(raw))
            self._noise[raw.stack] = is_own and (is_sum or _is_noise(raw.stack, is_put=True))
            self._noise[raw.stack] |= is_sum and _is_noise(raw.stack)
        return self._noise.get(raw.stack, False)

    def _stack_of_place(self, stack: RawStack) -> Any:
        """The first stack of the same places: CPython specialises instructions, which changes a call's offset."""
        if stack not in self._stacks:
            self._stacks[stack] = self._places.setdefault(symbolise(stack), stack)
        return self._stacks[stack]

    def _judge(self, used: Any, stacks: tuple[Any, ...], parts: list[_Part]) -> None:
        if not all(stack.codes and is_user_file(stack.codes[0].co_filename) for stack in stacks):
            return
        times, ops = min(part.times for part in parts), parts[0].ops
        sites = [symbolise(stack) for stack in stacks]
        places = [site.user_frame for site in sites]
        named = [None if place is None else _written(place, raw_op) for place, raw_op in zip(places, ops, strict=True)]
        name, place = named[-1], places[-1]
        if name is None or place is None or any(one != name for one in named):
            return
        origin, at, held = _origin(sites[-1].frames, name)
        is_of_loader = any(map(is_loaded, stacks))
        if _SETS.issuperset(ops) and not is_of_loader:
            if times >= _TIMES_ALONE and source.spoils_data(place, at, held):
                self._tell(used, stacks, parts, sites, name, ops, {"is_factor": "", "is_shifted": "random"})
            return
        if origin is None:
            member = _member_of(sites[-1].frames, name)
            origin, at, held = member if member[0] is not None else (origin, at, held)
        # No state takes in one number, or its own rows, in each of its parts, one part a round.
        is_of_batches = (
            len({part.last.storage for part in parts}) < len(parts) == len({part.last.sequence for part in parts})
            and len(parts[0].last.shape) > 1
        )
        is_sum, adds = SCALES.isdisjoint(ops), not SHIFTS.isdisjoint(ops)
        if (is_sum or (SHIFTS | FACTORS).issuperset(ops)) and not is_of_loader:
            # What is added and then subtracted is there for one round.
            is_one_way = len({op in _ADDS for op in ops if op in SHIFTS}) == adds
            is_noise = is_one_way and all(map(_is_noise, stacks)) and not source.is_of_copy(at, held)
            is_stored = is_of_batches or (len(parts) > 1 and source.is_labelled(at, held))
            is_batch = is_stored and (source.takes_result(place) or source.returns_argument(place, name))
            if is_noise and (is_batch or (is_sum and (is_of_batches or (len(parts) == 1 and times >= _TIMES_ALONE)))):
                is_state = not is_batch and not source.is_labelled(at, held)
                how = {"is_factor": "", "is_shifted": "noise" if adds else "", "is_drift": "yes" if is_state else ""}
                self._tell(used, stacks, parts, sites, name, ops, how)
                return
        if is_sum and not is_of_loader:
            return
        if origin is None and is_of_loader and source.returns_argument(place, re.split(r"[.\[]", name, maxsplit=1)[0]):
            origin = "element"
        if origin is None or (len(parts) == 1 and (times < _TIMES_ALONE or origin != "conversion")):
            return
        if not _SETS.isdisjoint(ops):
            # What the last write leaves is what the next epoch is given: it may put the old values back.
            is_spoiled = source.spoils_data(place, at, held)
            if is_spoiled and _SETS.issuperset(ops) and is_of_loader and source.returns_argument(place, name):
                self._tell(used, stacks, parts, sites, name, ops, {"is_factor": "", "is_shifted": "random"})
            return
        numbers = [None if one is None else source.number_given(one) for one in places]
        is_own = [source.is_of_itself(one, name) and not source.is_shifted_by_neighbours(one) for one in places if one]
        if any(own and op in SCALES for own, op in zip(is_own, ops, strict=True)):
            return
        if SCALES.isdisjoint(ops):
            if len(parts) > 1 and _is_shifted_on(ops, is_own):
                self._tell(used, stacks, parts, sites, name, ops, {"is_factor": "", "is_shifted": "yes"})
            return
        each = list(zip(ops, numbers, is_own, strict=True))
        if _is_undone(each) or _is_taken_back(ops, [source.operand_given(one) for one in places]):
            return
        if is_of_loader and source.is_state_of_loader(at, held):
            return
        takes_in = any(op in _ADDS and number is None and not own for op, number, own in each)
        scaled = max(at for at, op in enumerate(ops) if op in SCALES)
        # Noise is nothing that a refill would add, unless nothing else is left.
        adds_noise = [is_of_loader and numbers[scaled] != 0 and _is_noise(stack) for stack in stacks]
        later = list(zip(each, adds_noise, strict=True))[scaled + 1 :]
        if any(
            number is None and not own and op not in _BOUNDS and not (noise and op in SHIFTS)
            for (op, number, own), noise in later
        ):
            return
        # A value centred by its own mean and then scaled by something unknown is most likely normalised.
        if any(is_own) and numbers[scaled] is None and ops[scaled] not in _BENDS:
            return
        is_factor, factor = ops[scaled] in FACTORS, numbers[scaled]
        if not is_factor and ops[scaled] not in _BENDS and factor:
            factor = 1 / factor
        # Halving or doubling without a shift is a schedule.
        is_slow = factor is not None and _BENDS.isdisjoint(ops) and FADES <= abs(factor) <= 1 / FADES
        is_alone = sum(op not in _BOUNDS for op in ops) == 1
        fades = is_slow and (is_alone or (is_factor and abs(factor or 0) < 1))
        fades = fades and not (is_of_batches and any(op in SHIFTS and (number or own) for op, number, own in each))
        if not is_of_loader and (takes_in or fades):
            return
        # Objects of a simulation have their state in members, too: it is not scaled by one number again and again.
        is_number = factor is not None and abs(factor) not in (0, 1)
        if origin == "member" and not (is_number or ops[scaled] in _BENDS):
            return
        is_unknown = is_factor and factor is None and not is_of_loader
        self._tell(used, stacks, parts, sites, name, ops, {"is_factor": is_unknown})

    def _tell(
        self,
        used: Any,
        stacks: tuple[Any, ...],
        parts: list[_Part],
        sites: list[Site],
        name: str,
        ops: tuple[str, ...],
        how: dict[str, Any],
    ) -> None:
        self._described.add(stacks)
        times, last = min(part.times for part in parts), parts[0].last
        values = {"shape": last.shape, "dtype": "?", "device": "?", "times": times, "parts": len(parts), **how}
        clues = tuple(
            Clue("changed", site, name=name, op=op, values=values) for site, op in zip(sites, ops, strict=True)
        )
        self._report_at(ROW, used, *clues)


def _is_shifted_on(ops: tuple[str, ...], is_own: list[bool]) -> bool:
    """Whether each round adds or subtracts something that is neither undone at once nor the data's own mean."""
    shifts = [op for op, own in zip(ops, is_own, strict=True) if op in SHIFTS and not own]
    return bool(shifts) and len({op in _ADDS for op in shifts}) == 1 and not any(is_own)


def is_loaded(stack: RawStack) -> bool:
    """Whether a data loader called the writing code."""
    return any(_is_of_loader(code.co_filename) for code in stack.codes)


@functools.lru_cache(maxsize=1024)
def _is_of_loader(file: str) -> bool:
    return Path(_torch.package_folder(), "utils", "data") in Path(file).parents


def _parts(raws: list[RawWrite], may_pile_up: Callable[[RawWrite], bool]) -> Iterator[_Part]:
    """Yield the parts of a memory that the same lines wrote several times, with operations recorded in between."""
    by_region: dict[Any, list[RawWrite]] = {}
    for raw in raws:
        by_region.setdefault((raw.offset, raw.shape, raw.strides, raw.itemsize), []).append(raw)
    for written in by_region.values():
        stacks = tuple(dict.fromkeys(raw.stack for raw in written))
        times, rest = divmod(len(written), len(stacks))
        is_repeated = not rest and tuple(raw.stack for raw in written) == stacks * times
        rounds = [written[at * len(stacks)].sequence for at in range(times)]
        has_elements = all(raw.shape and max(raw.shape) > 1 for raw in written)
        has_graphs_between = all(before < after for before, after in itertools.pairwise(rounds))
        is_scaled = any(raw.op in SCALES for raw in written) or may_pile_up(written[0])
        if is_repeated and is_scaled and has_elements and has_graphs_between and len(stacks) <= _LINES and times > 1:
            yield _Part(stacks, tuple(raw.op for raw in written[: len(stacks)]), times, written[-1])


def _member_of(frames: tuple[Frame, ...], name: str) -> tuple[Literal["member"] | None, Frame, str]:
    """Return whether ``name`` is a member of what a loop walks over, there or in a caller of the function."""
    users, held, named = [at for at, frame in enumerate(frames) if frame.is_user], False, name
    for outer, inner in zip([*reversed(users[:-1]), None], reversed(users), strict=True):
        seen = {named}
        while (whole := source.container_of(frames[inner], named)) is not None and whole not in seen:
            held, named = True, whole
            seen.add(whole)
        if held and source.is_walked_over(frames[inner], named):
            return "member", frames[inner], named
        given = None
        if outer is not None:
            given = source.callers_expression(named, frames[inner], frames[outer], frames[outer + 1 : inner])
            if given is None and held and source.is_mapped(frames[outer]):
                return "member", frames[inner], named
        if given is None:
            break
        named = given
    return None, frames[-1], name


def _origin(
    frames: tuple[Frame, ...], name: str
) -> tuple[Literal["conversion", "element", "member"] | None, Frame, str]:
    """Return the origin of the value written as ``name``: there, or in a caller of the function.

    With the frame of its function and its name there.
    """
    users = [at for at, frame in enumerate(frames) if frame.is_user]
    named = name
    for outer, inner in zip([*reversed(users[:-1]), None], reversed(users), strict=True):
        origin = source.taken_for_own(frames[inner], named)
        if origin is not None or outer is None:
            return origin, frames[inner], named
        given = source.callers_expression(named, frames[inner], frames[outer], frames[outer + 1 : inner])
        passed = source.passed_for_own(frames[inner], frames[outer], named)
        if passed is not None or given is None:
            return passed, frames[inner if given is None else outer], given or named
        named = given
    return None, frames[-1], named


def _is_undone(each: list[tuple[str, float | None, bool]]) -> bool:
    """Whether the last of the scales, all by numbers, undoes the others, and nothing shifts."""
    whole = 1.0
    for op, number, _ in each:
        if op in _BENDS or op in SHIFTS or not number:
            return False
        whole *= number if op in FACTORS else 1 / number
    return abs(whole - 1) < _EQUAL


def _is_taken_back(ops: tuple[str, ...], operands: list[str | None]) -> bool:
    """Whether each change is undone by a later one with the same operand, the last one first."""
    open_: list[tuple[str, str]] = []
    for op, given in zip(ops, operands, strict=True):
        kind = next((one for one, names in _KINDS.items() if op in names), None)
        if kind is None or given is None:
            return False
        if open_ and open_[-1] == (_INVERSE[kind], given):
            open_.pop()
        else:
            open_.append((kind, given))
    return not open_


def _rows_written(raw: RawWrite) -> int:
    """How many rows a write of one row has written, by the index and the strides; 0 where it is that row alone."""
    if any(one is None or one is Ellipsis for one in raw.item or ()):
        return 0
    dims = zip(raw.item or (), raw.shape, raw.strides or (), strict=False)
    return next((size for part, size, stride in dims if type(part) is int and stride == 0 and size > 1), 0)


def _is_same_line(one: Any, other: Any) -> bool:
    here, there = symbolise(one).user_frame, symbolise(other).user_frame
    return here is not None and there is not None and (here.file, here.line) == (there.file, there.line)


def _written(place: Frame, op: str) -> str | None:
    elements = source.elements_updated_by(place) == op
    return source.written_expression(place, op, ()) or (
        source.written_expression(place, "__setitem__", ()) if elements else None
    )


def _is_of_copy(raw: RawWrite) -> bool:
    frames = symbolise(raw.stack).frames
    name = None if (place := symbolise(raw.stack).user_frame) is None else _written(place, raw.op)
    return name is not None and source.is_taken_for_copy(frames, name)


def _is_noise(stack: RawStack, *, is_put: bool = False) -> bool:
    place = symbolise(stack).user_frame
    if place is None or not is_user_file(stack.codes[0].co_filename):
        return False
    return source.writes_at_random(place) if is_put else source.adds_noise(place)
