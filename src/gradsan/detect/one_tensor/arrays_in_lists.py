"""NumPy arrays that are kept without a copy: ``states.append(torch.as_tensor(env.obs))``, ``noisy = y.numpy()``.

``as_tensor`` and ``from_numpy`` copy nothing, each call makes a new tensor over the array's memory, and what writes
into the array is not logged. So the values are compared: where one line was given the same memory for the third time,
with other values in between, and a list still holds two of its earlier tensors, then or at the next backward, all of
these are the last values. It is reported at the next backward.

And an array over the memory of a tensor without a graph, with other values than when the program got it, of which a
tensor is made while the program still reads the first one: after ``noisy = y.numpy()`` and ``noisy[:3] = 0``,
``loss(torch.from_numpy(noisy), y)`` takes one value twice. Or of which a second tensor is made, with other values,
while the program keeps the first one, by a call of the same function.

Row: ``arrays_are_one``. Role ``bound`` (the line; ``name`` of the list; ``values``: ``shape``, ``dtype``, ``device``).
Row: ``memory_of_array``. Roles: ``bound`` (where tensor and array became one memory; ``name`` of the tensor; ``op``;
``values`` as above), ``again`` (where a tensor was made of the array) and ``read``.
"""

from __future__ import annotations

import collections
import sys
import weakref
from collections.abc import Iterator
from dataclasses import replace
from types import FrameType
from typing import Any, NamedTuple

import torch

from gradsan import _torch, source
from gradsan.detect.exports import Exports
from gradsan.detect.meaning.changed_arrays import root_and_place
from gradsan.detect.one_tensor.second_names import at_line
from gradsan.graph import naming
from gradsan.graph.live import value_of
from gradsan.model import Clue, Failure, Frame, Site
from gradsan.record.detector import Run
from gradsan.record.log import RawStack, logged_writes
from gradsan.record.stacks import is_of_program, is_own_file, is_user_file, symbolise
from gradsan.record.steps import RawBackward

ROW, OF_ARRAY = "arrays_are_one", "memory_of_array"
_GIVES_ARRAY = frozenset({"numpy", "__array__"})
_PARTS, _ELEMENTS, _KEPT, _SEARCHES = 32, 2**14, 8, 8
_CALLS = 1_024
"""The calls of one line that are compared: a loop that goes on for hours pays nothing."""


class _Lent(NamedTuple):
    """The tensors that a line has made of a part of an array, its values the last time, and whether they changed."""

    root: weakref.ref[Any]
    tensors: list[_torch.weak_tensor]
    numbers: torch.Tensor
    is_changed: bool


class _Due(NamedTuple):
    """A finding that stands if the next backward is called while the second tensor, or a graph, has its ``storage``.

    And if the variable ``name``, where it is given, has a tensor whose memory begins at ``place``.
    """

    failure: Failure
    storage: Any
    name: str | None = None
    place: int = 0


class ArraysInLists:
    """Compares the values of arrays whenever they are passed to torch; made at the first one of a stretch."""

    def __init__(self, run: Run) -> None:
        self._core, self._listeners, self._found = run.core, run.listeners, run.report
        self._conflicts = run.conflicts
        self._exports = run.get(Exports)
        self._again = collections.Counter[RawStack]()
        self._latest: dict[tuple[int, ...], tuple[weakref.ref[Any], RawStack, _torch.weak_tensor, torch.Tensor]] = {}
        self._kept: list[_Due] = []
        self._parts: dict[tuple[RawStack, tuple[int, ...]], _Lent] = {}
        self._described: set[RawStack] = set()
        self._calls = collections.Counter[RawStack]()
        self._searches = 0
        self._waiting: dict[RawStack, tuple[RawStack, tuple[int, ...]]] = {}
        self._due: list[Failure] = []

    def lent(self, array: Any, tensor: torch.Tensor, stack: RawStack) -> None:
        """Note an array that was passed to torch, which has made ``tensor`` of it."""
        if stack in self._described or not 0 < tensor.numel() <= _ELEMENTS or self._calls[stack] >= _CALLS:
            return
        self._calls[stack] += 1
        root, place = root_and_place(array)
        key = (stack, place)
        if root is None or not is_of_program(stack):
            return
        if self._again[stack] < _KEPT:
            self._again[stack] += 1
            self._given_again(root, place, tensor, stack)
        # ``as_tensor`` copies where there is something to convert: float64 to float32.
        if _torch.memory_of(tensor)[0] != place[1]:
            return
        before = self._parts.get(key)
        if before is None and len(self._parts) >= _PARTS:
            self._parts = {key: one for key, one in self._parts.items() if one.root() is not None}
            if len(self._parts) >= _PARTS:
                return
        numbers = tensor.detach().clone()
        tensors, is_changed = [], False
        if before is not None and before.root() is root and before.numbers.dtype is numbers.dtype:
            tensors = [one for one in before.tensors if one() is not None][-_KEPT:]
            is_changed = bool(tensors) and (before.is_changed or not torch.equal(before.numbers, numbers))
        if len(tensors) > 1 and is_changed and self._searches < _SEARCHES:
            self._searches += 1
            if not self._judge(stack, tensors):
                # ``list(batches())`` can be found when the generator has ended.
                self._waiting[stack] = key
                self._listeners.call_before_backward(self.before_backward)
        self._parts[key] = _Lent(weakref.ref(root), [*tensors, _torch.weak_tensor(tensor)], numbers, is_changed)

    def _given_again(self, root: Any, place: tuple[int, ...], tensor: torch.Tensor, stack: RawStack) -> None:
        """Report an array that torch is given with other values while the program reads a tensor of the old ones."""
        owner, site = root.base, symbolise(stack)
        if type(owner) in _torch.PLAIN_TENSORS:
            storage = _torch.storage_or_none(owner)
            export = self._exports.of(storage)
            if export is None or export.op not in _GIVES_ARRAY or self._exports.changed_since(owner, 0, None) is None:
                return
            # Blank memory is made to be filled.
            is_blank = export.snapshot is None or not any(export.snapshot)
            if is_blank or any(raw.storage == storage for raw in logged_writes(self._core, export.clock)):
                return
            for frame, at in _running(site):
                held = {key: one for key, one in _torch.locals_of(frame).items() if _is_in(one, storage)}
                if any(one.requires_grad for one in held.values()):
                    return
                lines = ((name, _read_from(at, name, at == site.user_frame)) for name in held)
                name, line = next(((name, line) for name, line in lines if line is not None), (None, 0))
                if name is not None and line is not None:
                    bound = Clue("bound", symbolise(export.stack), name, export.op, values=_torch.facts_of(owner))
                    self._keep(stack, tensor, bound, Clue("read", at_line(site, at, line)))
                    return
            return
        before = self._latest.get(place)
        if before is None and len(self._latest) >= _PARTS:
            self._latest = {key: one for key, one in self._latest.items() if one[0]() is not None}
            if len(self._latest) >= _PARTS:
                return
        self._latest[place] = weakref.ref(root), stack, _torch.weak_tensor(tensor), tensor.detach().clone()
        if before is None or before[0]() is not root or before[2]() is None or torch.equal(before[3], tensor):
            return
        for _, at in _running(site):
            second = source.earlier_result(at)
            if second is not None and at != site.user_frame:
                bound = Clue("bound", symbolise(before[1]), second.name, "from_numpy", values=_torch.facts_of(tensor))
                self._keep(stack, tensor, bound, Clue("read", at_line(site, at, second.read)), second.name)
                return

    def _keep(self, stack: RawStack, tensor: torch.Tensor, bound: Clue, read: Clue, name: str | None = None) -> None:
        """Keep a finding until the next backward, before which a graph may have ``tensor`` alone."""
        self._described.add(stack)
        failure = Failure(
            OF_ARRAY, "", "", symbolise(stack), (bound, Clue("again", symbolise(stack)), read), raised=False
        )
        weak = _torch.weak_storage(tensor.untyped_storage())
        self._kept.append(_Due(failure, weak, name, _torch.memory_of(tensor)[0]))
        self._listeners.call_before_backward(self.before_backward)

    def before_backward(self, entry: RawBackward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Judge the kept findings; as ``listeners.BeforeBackward``."""
        self._due += [one.failure for one in self._kept if not one.storage.expired() and _is_held(one)]
        self._kept.clear()
        for stack, key in self._waiting.items():
            if stack not in self._described and key in self._parts:
                self._judge(stack, self._parts[key].tensors)
        self._waiting.clear()
        self._listeners.call_before_backward(self.before_backward, False)
        self._listeners.call_after_backward(self.after_backward)

    def _judge(self, stack: RawStack, kept: list[_torch.weak_tensor]) -> bool:
        """Whether a list of the program's has several of the tensors."""
        tensors = [held for one in kept if (held := one()) is not None]
        found = naming.find(sys._getframe(1), lambda one: any(one is other for other in tensors))
        times = collections.Counter(
            within
            for within, _ in {(one.within, id(one.tensor)) for one in found if one.container in naming.COLLECTING}
        )
        name = next((within for within, many in times.items() if many > 1), None)
        if name is not None:
            self._described.add(stack)
            site = symbolise(stack)
            clue = Clue("bound", site, name=name, values=_torch.facts_of(tensors[0]))
            self._due.append(Failure(ROW, "", "", site, (clue,), raised=False))
            self._listeners.call_after_backward(self.after_backward)
        return name is not None

    def after_backward(self, entry: RawBackward) -> None:
        """Report what was found before the first backward after it; as ``listeners.AfterBackward``."""
        due, self._due = self._due, []
        self._listeners.call_after_backward(self.after_backward, False)
        told = {one.alias_site.user_frame for one in self._conflicts if one.alias_site is not None}
        for one in due:
            again = one.clue("again")
            if again is None or again.user_frame not in told:
                self._found(replace(one, site=symbolise(entry.stack)))


def _is_in(value: Any, storage: int) -> bool:
    return type(value) in _torch.PLAIN_TENSORS and _torch.storage_or_none(value) == storage


def _is_held(due: _Due) -> bool:
    """Whether a variable of that name, if there is to be one, has a tensor of that memory."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and due.name is not None:
        held: Any = value_of(frame, due.name) if is_user_file(frame.f_code.co_filename) else None
        if type(held) in _torch.PLAIN_TENSORS:
            return _torch.memory_of(held)[0] == due.place
        frame = frame.f_back
    return due.name is None


def _running(site: Site) -> Iterator[tuple[FrameType, Frame]]:
    """The program's running functions, innermost first, with their places in ``site``."""
    frame: FrameType | None = sys._getframe(1)
    places = [one for one in reversed(site.frames) if one.is_user]
    while frame is not None:
        file = frame.f_code.co_filename
        if is_user_file(file) and not is_own_file(file):
            at = next((one for one in places if (one.file, one.line) == (file, frame.f_lineno)), None)
            if at is not None:
                yield frame, at
        frame = frame.f_back


def _read_from(place: Frame, name: str, is_first: bool) -> int | None:
    """The line that reads a variable behind the running statement; or that statement, where it makes the tensor."""
    statement = source.statement_at(place)
    if is_first and statement is not None and name in source.consumed_names(statement):
        return place.line
    return source.read_behind(place, name)
