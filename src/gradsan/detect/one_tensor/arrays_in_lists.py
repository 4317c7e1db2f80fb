"""NumPy arrays that are kept in a list without a copy: ``states.append(torch.as_tensor(env.obs))``.

``as_tensor`` and ``from_numpy`` copy nothing, each call makes a new tensor over the array's memory, and what writes
into the array is not logged. So the values are compared: where one line was given the same memory for the third time,
with other values in between, and a list still holds two of its earlier tensors, all of these are the last values. It
is reported at the next backward.

Row: ``arrays_are_one``. Role ``bound`` (the line; ``name`` of the list; ``values``: ``shape``, ``dtype``, ``device``).
"""

from __future__ import annotations

import collections
import sys
import weakref
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from gradsan import _torch
from gradsan.detect.meaning.changed_arrays import root_and_place
from gradsan.graph import naming
from gradsan.model import Clue, Failure
from gradsan.record.detector import Run
from gradsan.record.log import RawStack
from gradsan.record.stacks import is_of_program, symbolise
from gradsan.record.steps import RawBackward

ROW = "arrays_are_one"
_PARTS, _ELEMENTS, _KEPT, _SEARCHES = 32, 2**14, 8, 8
_CALLS = 1_024
"""The calls of one line that are compared: a loop that goes on for hours pays nothing."""


class _Lent(NamedTuple):
    """The tensors that a line has made of a part of an array, its values the last time, and whether they changed."""

    root: weakref.ref[Any]
    tensors: list[_torch.weak_tensor]
    numbers: torch.Tensor
    is_changed: bool


class ArraysInLists:
    """Compares the values of arrays whenever they are passed to torch; made at the first one of a stretch."""

    def __init__(self, run: Run) -> None:
        self._listeners, self._found = run.listeners, run.report
        self._parts: dict[tuple[RawStack, tuple[int, ...]], _Lent] = {}
        self._described: set[RawStack] = set()
        self._calls = collections.Counter[RawStack]()
        self._searches = 0
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
            self._judge(stack, [held for one in tensors if (held := one()) is not None])
        self._parts[key] = _Lent(weakref.ref(root), [*tensors, _torch.weak_tensor(tensor)], numbers, is_changed)

    def _judge(self, stack: RawStack, tensors: list[torch.Tensor]) -> None:
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

    def after_backward(self, entry: RawBackward) -> None:
        """Report what was found before the first backward after it; as ``listeners.AfterBackward``."""
        due, self._due = self._due, []
        self._listeners.call_after_backward(self.after_backward, False)
        for one in due:
            self._found(replace(one, site=symbolise(entry.stack)))
