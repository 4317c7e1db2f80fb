"""NumPy arrays scaled in place again in every epoch: ``x = torch.from_numpy(data[i]); x /= 255``.

``from_numpy`` and ``as_tensor`` copy nothing, and each call makes a new tensor, with a counter of its own; NumPy's own
writes (``window -= mean``) are not logged. So the values are compared: memory of one array, passed to torch again and
again with training in between, has each time the previous values scaled by the same factor far from 1 (and shifted), or
by powers of it where the windows overlap, or a function such as the logarithm of them. A refilled array has not,
whatever random gain it gets, and slow decay or growth is meant. Reported for two parts or more, if none ever had other
values.

What code of a data loader writes into the tensor need not scale: a part that is passed again with just the values that
those writes had left, and that were not those it was passed with, is the data set itself, changed in each epoch.

Row: ``data_changed_again``, as in ``changed_again.py``.
"""

from __future__ import annotations

import math
import weakref
from typing import Any, NamedTuple

import torch

from gradsan import _torch, source
from gradsan.detect.meaning.changed_again import FACTORS, FADES, ROW, SCALES, SHIFTS, is_loaded
from gradsan.detect.one_tensor.second_names import at_line
from gradsan.model import Clue, Failure
from gradsan.record.detector import Run
from gradsan.record.log import RawStack, RawWrite, latest_backward, logged_writes
from gradsan.record.stacks import is_of_program, is_user_file, symbolise

_PARTS, _ELEMENTS, _DISTINCT = 32, 2**14, 8
_TIMES, _NEAR = 3, 1e-3
_BENDS = (torch.log1p, torch.log, torch.sqrt, torch.square, torch.exp, torch.expm1, torch.tanh, torch.log10, torch.log2)


class _Lent(NamedTuple):
    """A part of an array when it was last passed to torch, and how often it was scaled since the first time."""

    root: weakref.ref[Any]
    clock: int
    backwards: int
    storage: int
    stack: RawStack
    numbers: torch.Tensor
    times: int


class _Loaded(NamedTuple):
    """A part of an array that a data loader's code passed last time: its values then, and those that its writes left.

    ``times`` is how often it has come back with what the writes before had left.
    """

    root: weakref.ref[Any]
    layout: tuple[Any, int, Any]
    clock: int
    backwards: int
    storage: int
    passed: Any
    left: Any = None
    writes: tuple[RawWrite, ...] = ()
    times: int = 0


class ChangedArrays:
    """Compares the values of arrays whenever they are passed to torch; made at the first one of a stretch."""

    def __init__(self, run: Run) -> None:
        self._core, self._found = run.core, run.report
        self._parts: dict[tuple[int, ...], _Lent] = {}
        self._refuted: set[Any] = set()
        self._factors: dict[Any, float] = {}
        self._loaded: dict[tuple[int, ...], _Loaded] = {}
        self._last: tuple[int, ...] | None = None
        self._described = False

    def lent(self, array: Any, tensor: torch.Tensor, stack: RawStack) -> None:
        """Note an array that was passed to torch, which has made ``tensor`` of it."""
        is_small = torch.is_floating_point(tensor) and _DISTINCT <= tensor.numel() <= _ELEMENTS
        is_of_loader = is_loaded(stack)
        is_due = stack not in self._refuted or is_of_loader
        if self._described or not is_small or not is_due or not is_of_program(stack):
            return
        root, place = root_and_place(array)
        if root is None:
            return
        if is_of_loader:
            self._came_back(root, place, array, tensor)
        if stack in self._refuted or self._described:
            return
        before = self._parts.get(place)
        if before is None or before.root() is not root or before.stack != stack:
            if len(self._parts) >= _PARTS:
                self._forget_dead()
            if len(self._parts) >= _PARTS:
                return
            before = None
        core, times = self._core, 0
        if before is not None and core.backwards == before.backwards:
            return
        numbers = tensor.detach().reshape(-1).to(torch.float64, copy=True)
        if before is not None:
            is_again = self._is_scaled_again(stack, _factor(before.numbers, numbers))
            if not is_again and not _is_bent(before.numbers, numbers):
                self._refuted.add(stack)
                return
            times = before.times + 1
        storage = before.storage if before is not None else 0
        self._parts[place] = _Lent(
            weakref.ref(root), core.tick(), core.backwards, _torch.storage_or_none(tensor), stack, numbers, times
        )
        latest = None if before is None else latest_backward(core)
        if before is not None and latest is not None:
            self._judge(before._replace(storage=storage), latest.stack)

    def _came_back(self, root: Any, place: tuple[int, ...], array: Any, tensor: torch.Tensor) -> None:
        """Compare a part with what was left of it, and note what was left of the part that was passed before this."""
        core, last = self._core, self._loaded.get(self._last or ())
        if last is not None and self._last is not None and self._last != place and last.backwards == core.backwards:
            held = last.root()
            writes = tuple(raw for raw in logged_writes(core, last.clock) if raw.storage == last.storage)
            left = None if held is None or not writes else _values(held, last.layout)
            self._loaded[self._last] = last._replace(left=left, writes=writes)
        self._last = place
        before = self._loaded.get(place)
        # What begins as a number is a state, as weights of the samples are.
        is_new = before is None and (len(self._loaded) >= _PARTS or len(set(array.ravel().tolist())) < _DISTINCT)
        if is_new:
            return
        start = int(root.__array_interface__["data"][0])
        layout = array.dtype, int(array.__array_interface__["data"][0]) - start, (array.shape, array.strides)
        passed, times = array.copy(), 0
        if before is not None and before.root() is root and before.left is not None:
            is_as_left = bool((before.left == passed).all()) and not bool((before.left == before.passed).all())
            times = before.times + 1 if is_as_left and before.backwards < core.backwards else 0
        storage = _torch.storage_or_none(tensor)
        self._loaded[place] = _Loaded(
            weakref.ref(root), layout, core.tick(), core.backwards, storage, passed, times=times
        )
        again = [one for one in self._loaded.values() if one.times >= _TIMES - 1]
        latest = latest_backward(core)
        if len(again) > 1 and before is not None and latest is not None:
            self._tell_loaded(before, len(again), latest.stack)

    def _tell_loaded(self, before: _Loaded, parts: int, used: Any) -> None:
        stacks = {raw.stack: raw.op for raw in before.writes}
        facts = {"shape": before.passed.shape, "dtype": "?", "device": "cpu", "times": before.times + _TIMES - 1}
        facts |= {"parts": parts, "is_factor": "", "is_shifted": "yes"}
        clues = []
        for stack, op in stacks.items():
            frame = (site := symbolise(stack)).user_frame
            name = None if frame is None else source.written_expression(frame, op)
            if name is not None:
                clues.append(Clue("changed", site, name=name, op=op, values=facts))
        if clues:
            self._described = True
            self._found(Failure(ROW, "", "", symbolise(used), tuple(clues), raised=False))

    def _forget_dead(self) -> None:
        """Forget arrays that are gone, and lines that only pass such: an array made for one round never comes again."""
        lines = {one.stack for one in self._parts.values()}
        self._parts = {key: one for key, one in self._parts.items() if one.root() is not None}
        self._refuted |= lines - {one.stack for one in self._parts.values()}

    def _is_scaled_again(self, stack: RawStack, factor: float | None) -> bool:
        """Whether ``factor`` is the earlier one at ``stack``, or a power of it, and far from 1.

        Code called by a data loader keeps no state in the data that might decay.
        """
        slow = 1 - _NEAR if is_loaded(stack) else FADES - _NEAR
        if factor is None or slow < factor < 1 / slow:
            return False
        known = self._factors.setdefault(stack, factor)
        least, most = sorted((math.log(known), math.log(factor)), key=abs)
        self._factors[stack] = math.exp(least)
        times = most / least
        return times > 0 and abs(times - round(times)) < _NEAR * times

    def _judge(self, last: _Lent, used: Any) -> None:
        scaled = [one for one in self._parts.values() if one.stack == last.stack and one.times]
        if len(scaled) < 2 or sum(one.times for one in scaled) < _TIMES:
            return
        clues = self._written(last) or self._written_by_numpy(last)
        if not clues:
            return
        self._described = True
        site, _, op = clues[-1]
        factor = None if op not in FACTORS or site.user_frame is None else source.number_given(site.user_frame)
        facts: dict[str, Any] = {"shape": tuple(last.numbers.shape), "dtype": "?", "device": "cpu"}
        facts["is_factor"] = op in FACTORS and factor is None
        facts |= {"times": max(one.times for one in scaled) + 1, "parts": len(scaled)}
        named = tuple(Clue("changed", site, name=name, op=op, values=facts) for site, name, op in clues)
        self._found(Failure(ROW, "", "", symbolise(used), named, raised=False))

    def _written(self, last: _Lent) -> list[tuple[Any, str, str]]:
        """Return the lines that wrote the tensor made of the part the last time."""
        raws: list[RawWrite] = []
        for raw in logged_writes(self._core, last.clock):
            if raw.storage == last.storage and raw.version == len(raws) + 1:
                raws.append(raw)
        if not any(raw.op in SCALES for raw in raws) or not all(raw.op in SCALES or raw.op in SHIFTS for raw in raws):
            return []
        # Another tensor may have got this address since: the line must write the call's result in the same function.
        lent = symbolise(last.stack).user_frame
        statement = None if lent is None else source.statement_at(lent)
        given = [] if statement is None else source.assigned_names(statement)
        found = []
        for raw in raws:
            site = symbolise(raw.stack)
            frame = site.user_frame
            is_there = _own_code(raw.stack) is _own_code(last.stack)
            name = source.written_expression(frame, raw.op) if frame is not None and is_there else None
            found += [(site, name, raw.op)] if name in given and name is not None else []
        return found if len(found) == len(raws) else []

    @staticmethod
    def _written_by_numpy(last: _Lent) -> list[tuple[Any, str, str]]:
        site = symbolise(last.stack)
        frame = site.user_frame
        scaled = None if frame is None else source.scaled_before(frame)
        return [] if frame is None or scaled is None else [(at_line(site, frame, scaled.line), scaled.name, scaled.op)]


def _values(root: Any, layout: tuple[Any, int, Any]) -> Any:
    """A copy of the values of a part of an array; None where the array itself is no one piece of memory."""
    dtype, offset, (shape, strides) = layout
    is_whole = bool(root.flags.c_contiguous) and type(root).__name__ == "ndarray"
    return type(root)(shape, dtype, root, offset, strides).copy() if is_whole else None


def root_and_place(array: Any) -> tuple[Any, tuple[int, ...]]:
    """Return the array that owns the memory, and the part of it that ``array`` covers."""
    if type(array).__module__ != "numpy" or not hasattr(array, "__array_interface__"):
        return None, ()
    root = array
    while type(root.base) is type(array):
        root = root.base
    return root, (id(root), int(array.__array_interface__["data"][0]), *array.shape)


def _factor(before: torch.Tensor, now: torch.Tensor) -> float | None:
    """The factor with which ``before``, plus one number, gives ``now``; or the base of such factors; None for neither.

    Both are float64 of one dimension; a factor is positive.
    """
    if before.shape != now.shape or not (before.isfinite().all() and now.isfinite().all()):
        return None
    if len(before.unique()) < _DISTINCT or len(now.unique()) < _DISTINCT:
        return None
    apart = before - before.mean()
    factor = float(apart.dot(now - now.mean()) / apart.dot(apart))
    left = (now - now.mean() - factor * apart).abs().max()
    if bool(left <= 1e-4 * (now - now.mean()).abs().max()):
        return factor if factor > 0 else None
    known = before != 0
    ratios = now[known] / before[known]
    if not bool((ratios > 0).all()):
        return None
    powers = ratios.log()
    least = float(powers[powers.abs().argmin()])
    times = powers / least if abs(least) > _NEAR else powers.new_zeros(1)
    is_power = bool((times > 0).all()) and bool((times - times.round()).abs().max() < _NEAR)
    return math.exp(least) if is_power else None


def _is_bent(before: torch.Tensor, now: torch.Tensor) -> bool:
    """Whether ``now`` has a function of each value of ``before``, and no other."""
    if before.shape != now.shape or len(before.unique()) < _DISTINCT or bool((before - now).abs().max() < _NEAR):
        return False
    bent = (bend(before) for bend in _BENDS)
    return any(bool(one.isfinite().all()) and torch.allclose(one, now, rtol=_NEAR / 10) for one in bent)


def _own_code(stack: RawStack) -> Any:
    """Return the program's own function at the top of a stack."""
    return next((code for code in stack.codes if is_user_file(code.co_filename)), None)
