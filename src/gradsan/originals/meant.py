"""Gradients that would result if writes unknown to autograd were part of the computation, as measured by deep mode.

The writes to a value are noted with their operands. Where all of them only add to it or scale it, their
backward is known: the gradient at the value is scaled as the value was, and flows on into the added terms.
Both backwards are run on the side. Where an operation has read the value before a write, where a hook of the program's
reads its gradient, or where anything else was written, the result is unknown.

Where they add what depends on no parameter, no mode has to measure: the gradients are the same.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import Node

from gradsan import _torch
from gradsan.graph import naming, walk
from gradsan.model import Deviation
from gradsan.originals.comparing import is_rounding, relative_error
from gradsan.originals.deep import Deep
from gradsan.originals.side_backward import UNKNOWN, HooksOnTheWay
from gradsan.record.log import RawWrite

_ADDS = frozenset({"add_", "sub_", "__iadd__", "__isub__"})
_DIVIDES = frozenset({"div_", "__itruediv__"})
_SCALES = _DIVIDES | {"mul_", "__imul__"}
_NOTED = _ADDS | _SCALES
_ADDED = frozenset({"AddBackward0", "SubBackward0"})
_VALUES, _WRITES_OF_A_VALUE, _ELEMENTS = 64, 16, 2**20


class Value(NamedTuple):
    """A value's memory, and the Node and output ``number`` that made it."""

    storage: int
    place: tuple[Any, ...]
    node: Node
    number: int


class _Write(NamedTuple):
    """A write to the value at ``place``: it adds the output of ``node`` (None: a constant), or scales by ``factor``."""

    op: str
    place: tuple[Any, ...]
    node: Node | None = None
    factor: Any = None
    version: int = 0


class Meant:
    """Notes writes, and on request measures gradients as if autograd had recorded them."""

    def __init__(self, deep: Deep) -> None:
        """Run backwards on the side by ``deep``."""
        self._deep = deep
        self._writes: dict[int, list[_Write | None]] = {}
        self._earlier: dict[int, list[_Write | None]] = {}

    def forget(self) -> None:
        """Drop everything noted."""
        self._writes, self._earlier = {}, {}

    def begin_round(self) -> None:
        """Drop the notes of earlier rounds except the last one, whose backward may still be examined."""
        self._earlier, self._writes = self._writes, {}

    def note(self, op: str, args: tuple[Any, ...], kwargs: dict[str, Any], bypassed: Callable[[int], bool]) -> None:
        """Note a call that wrote in place, unrecorded to a value with a graph, or to a storage that is ``bypassed``."""
        if op not in _NOTED or not self._deep.is_on or not args or type(args[0]) not in _torch.PLAIN_TENSORS:
            return
        target = args[0]
        storage = _torch.storage_or_none(target)
        is_recorded = _torch.is_grad_enabled() or _torch.grad_fn_of(target) is None
        if not storage or (is_recorded and not bypassed(storage)):
            return
        known = self._writes.setdefault(storage, []) if len(self._writes) < _VALUES else self._writes.get(storage)
        if known is not None and len(known) < _WRITES_OF_A_VALUE:
            known.append(_noted(op, target, args[1:], kwargs))

    def deviation(self, value: Value, raws: Sequence[RawWrite], outputs: Sequence[Any]) -> Deviation | None:
        """Return the deviation of a backward's gradients from those that include the writes ``raws``.

        None where that is unknown, or nothing differs.
        """
        known = self._earlier.get(value.storage, []) + self._writes.get(value.storage, [])
        writes = [one for one in known if one is not None and one.place == value.place]
        is_known = bool(raws) and len(writes) == len(known) and [one.op for one in writes] == [raw.op for raw in raws]
        if not (is_known and self._deep.is_on and self._deep.measures) or len(outputs) != 1 or outputs[0].numel() != 1:
            return None
        if any(torch.is_tensor(one.factor) and one.factor._version != one.version for one in writes):
            return None
        order = walk.engine_order([outputs[0].grad_fn])
        first = min(raw.sequence for raw in raws)
        readers = [one for one in order if any(child is value.node for child, _ in one.next_functions)]
        if any((_torch.node_sequence(one) or 0) < first for one in readers) or _torch.may_communicate(order):
            return None
        return self._measured(outputs[0], order, value, writes)

    def _measured(
        self, output: torch.Tensor, order: list[Node], value: Value, writes: list[_Write]
    ) -> Deviation | None:
        added: list[tuple[Any, Any]] = []

        def change(received: dict[int, Any]) -> None:
            gradient = received.get(value.number)
            if gradient is None or gradient is UNKNOWN:
                return
            for one in reversed(writes):
                if one.node is not None:
                    added.append((one.node, gradient))
                elif one.factor is not None:
                    gradient = gradient / one.factor if one.op in _DIVIDES else gradient * one.factor
            received[value.number] = gradient

        leaves, hooks = walk.leaves_of(order), self._deep.hooks_on_the_way()
        now = self._deep.gradients_aside(output, None, leaves, order, HooksOnTheWay(hooks))
        through = _Through(hooks, node=value.node, change=change)
        meant = self._deep.gradients_aside(output, None, leaves, order, through)
        if now is None or meant is None:
            return None
        of_leaves = {id(leaf): [leaf, *both] for leaf, *both in zip(leaves, now, meant, strict=True)}
        for node, gradient in added:
            below = walk.engine_order([node])
            own, edge = walk.leaves_of(below), torch.autograd.graph.GradientEdge(node, 0)
            found = self._deep.gradients_aside(edge, [gradient], own, below, HooksOnTheWay(hooks))
            if found is None:
                return None
            for leaf, more in zip(own, found, strict=True):
                both = of_leaves.setdefault(id(leaf), [leaf, None, None])
                both[2] = more if both[2] is None else both[2] if more is None else both[2] + more
        return _between(of_leaves.values())


@dataclass(slots=True)
class _Through(HooksOnTheWay):
    """Changes the gradients that ``node`` receives, where no hook of the program's sees them."""

    node: Node | None = None
    change: Callable[[dict[int, Any]], None] = lambda received: None

    def apply(self, node: Node, received: dict[int, Any], passed_over: Callable[[str], None]) -> None:
        """Apply the hooks; at ``node``, change the gradients instead."""
        if node is not self.node:
            HooksOnTheWay.apply(self, node, received, passed_over)
        elif self.at(node):
            passed_over("hook")
        else:
            self.change(received)


class Sums:
    """Additions of constants to values under ``no_grad``: the gradient is the same as if autograd had recorded them."""

    def __init__(self) -> None:
        """Note the calls of rounds by :meth:`note`."""
        self._depending: set[int] = set()
        self._noted: dict[tuple[int, int], bool] = {}
        self._earlier: dict[tuple[int, int], bool] = {}
        self._of_constants: dict[Any, bool] = {}

    def begin_round(self) -> None:
        """Drop the memory of values, and the notes of earlier rounds except the last one."""
        self._depending.clear()
        self._earlier, self._noted = self._noted, {}

    def note(self, op: str, given: list[torch.Tensor], result: Any, aliased: Collection[int]) -> None:
        """Note a call under ``no_grad`` with the tensors ``given``; memory of ``aliased`` may be that of parameters."""
        is_sum = op in _ADDS and bool(given) and _torch.grad_fn_of(given[0]) is not None
        storages = [_torch.storage_or_none(one) for one in given]
        # Some operations read only the shape and kind of a tensor.
        depends = not (op.endswith("_like") or op.startswith("new_")) and any(
            one.requires_grad or at in self._depending or at in aliased
            for one, at in zip(given[is_sum:], storages[is_sum:], strict=True)
        )
        if is_sum:
            self._noted[storages[0], int(given[0]._version)] = not depends
            return
        (self._depending.update if depends else self._depending.difference_update)(
            map(_torch.storage_or_none, _torch.tensors_in(result))
        )

    def is_of_constant(self, raw: RawWrite) -> bool:
        """Whether all writes at the stack of ``raw`` have added constants, as far as they were noted."""
        at = raw.storage, raw.version or 0
        noted = self._noted.get(at, self._earlier.get(at))
        if noted is not None:
            self._of_constants[raw.stack] = noted and self._of_constants.get(raw.stack, True)
        return self._of_constants.get(raw.stack, False)


def _between(of_leaves: Any) -> Deviation | None:
    errors = []
    for leaf, now, meant in of_leaves:
        wanted = meant if meant is not None else None if now is None else torch.zeros_like(now)
        if wanted is None:
            continue
        error = relative_error(wanted, now if now is not None else torch.zeros_like(wanted))
        if error == float("inf"):
            return None
        if not is_rounding(error, wanted):
            errors.append((naming.name_of(leaf, sys._getframe(1)) or str(tuple(leaf.shape)), error))
    return Deviation(tuple(sorted(errors, key=lambda one: -one[1]))) if errors else None


def place_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return the part of its memory that a tensor covers."""
    return tuple(tensor.shape), tuple(tensor.stride()), tensor.storage_offset()


def _noted(op: str, target: Any, given: tuple[Any, ...], kwargs: dict[str, Any]) -> _Write | None:
    """Return the note of a write that has happened; None where it does anything else than add or scale.

    ``loss.data += penalty`` has given the tensor made by ``loss.data`` a graph, which is that of the penalty alone.
    """
    operand, place = next(iter(given), None), place_of(target)
    if len(given) != 1 or set(kwargs) - {"alpha"}:
        return None
    has_graph = torch.is_tensor(operand) and operand.requires_grad
    if op in _ADDS:
        if not has_graph:
            return _Write(op, place)
        made = target.grad_fn if _torch.is_grad_enabled() else None
        is_sum = made is not None and made.name() in _ADDED and made.next_functions[0][0] is None
        return _Write(op, place, made) if is_sum else None
    if op in _SCALES and not has_graph and not kwargs:
        if torch.is_tensor(operand) and operand.numel() <= _ELEMENTS:
            return _Write(op, place, None, operand.detach(), operand._version)
        return _Write(op, place, None, operand) if isinstance(operand, int | float) else None
    return None
