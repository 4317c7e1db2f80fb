"""Origins of non-finite results: the operation that made each, and their chain."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from gradsan import _torch
from gradsan.detect.nonfinite.values import Searched
from gradsan.model import NonFiniteValue, Operand
from gradsan.record.log import RawStack

_KEPT = 4_096
_UNSEEN = 8
"""The number of Nodes searched downwards for a known one."""

How = Literal["made", "nan_of_inf", "constant", "memory", "given", "untraced", "passed", "gradient", "update"]


@dataclass(slots=True, eq=False)
class Origin:
    """A non-finite result.

    ``how``: ``made`` of finite operands; ``nan_of_inf`` NaN from operands with Inf and without NaN; ``constant`` a
    literal of the program (a mask's -inf); ``memory`` uninitialised; ``given`` to the program from outside;
    ``untraced`` from an operation that was not seen; ``passed`` on from ``parents``; ``gradient`` of a Node whose own
    gradients were finite; ``update`` by a step. ``number`` counts the origins; ``stack`` is a raw stack.
    ``in_backward``: the program's own code made it while a backward ran. ``has_graph``: a gradient flows through the
    result. ``redrawn``: its elements are those of another run, with other random numbers.
    """

    how: How
    op: str
    stack: RawStack
    value: NonFiniteValue
    number: int = 0
    parents: tuple[Origin, ...] = ()
    facts: Searched | None = None
    operands: tuple[Operand, ...] = ()
    name: str | None = None
    scalars: tuple[tuple[str, str], ...] = ()
    in_backward: bool = False
    has_graph: bool = False
    redrawn: bool = False


@dataclass(slots=True)
class _Entry:
    life: Any
    origin: Origin


@dataclass(slots=True)
class Origins:
    """The origins of non-finite memory, by storage; the oldest are dropped."""

    _by_storage: OrderedDict[int, _Entry] = field(default_factory=OrderedDict)
    _by_node: OrderedDict[int, Origin] = field(default_factory=OrderedDict)
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def __bool__(self) -> bool:
        """Whether an origin is known."""
        return bool(self._by_storage)

    def keep(self, tensor: torch.Tensor, origin: Origin) -> Origin:
        """Store the origin of a tensor's non-finite values."""
        origin.number = next(self._numbers)
        self.link(tensor, origin)
        return origin

    def link(self, tensor: torch.Tensor, origin: Origin) -> None:
        """Note that a tensor has the non-finite values of a known origin."""
        storage = _torch.storage_or_none(tensor)
        if storage:
            self._by_storage[storage] = _Entry(_torch.weak_storage(tensor.untyped_storage()), origin)
            self._by_storage.move_to_end(storage)
            if len(self._by_storage) > _KEPT:
                self._by_storage.popitem(last=False)
        node = tensor.grad_fn
        number = _torch.node_sequence(node)
        if number is not None:
            self._by_node[number] = origin
            if len(self._by_node) > _KEPT:
                self._by_node.popitem(last=False)

    def of(self, tensor: torch.Tensor) -> Origin | None:
        """Return the origin of a tensor's memory, or of the values that it was computed from; None if unknown."""
        storage = _torch.storage_or_none(tensor)
        entry = self._by_storage.get(storage)
        if entry is not None and not entry.life.expired():
            return entry.origin
        # A call that was not seen lies in between: indexing, with the pure core.
        node = tensor.grad_fn
        for _ in range(_UNSEEN):
            if node is None:
                return None
            known = self._by_node.get(_torch.node_sequence(node) or -1)
            if known is not None:
                return known
            node = node.next_functions[0][0] if node.next_functions else None
        return None

    def forget(self, tensor: torch.Tensor) -> None:
        """Forget a tensor's memory, which is finite again."""
        self._by_storage.pop(_torch.storage_or_none(tensor), None)

    def clear(self) -> None:
        """Begin anew."""
        self._by_storage.clear()
        self._by_node.clear()


def first_cause(origin: Origin) -> tuple[Origin, tuple[Origin, ...]]:
    """Return the root cause of ``origin``, and the path from there to it, both ends included.

    Constants are meant: not a mask of -inf is a cause, but the operation that makes NaN of it. Of several causes the
    earliest counts; where there are only constants, the earliest of those.
    """
    came_from: dict[int, Origin | None] = {id(origin): None}
    waiting, roots = [origin], []
    while waiting:
        one = waiting.pop()
        if not one.parents or (one.how == "nan_of_inf" and all(_is_meant(parent) for parent in one.parents)):
            roots.append(one)
            continue
        for parent in one.parents:
            if id(parent) not in came_from:
                came_from[id(parent)] = one
                waiting.append(parent)
    found = min(roots, key=lambda one: (one.how == "constant", one.number))
    passed: list[Origin] = []
    at: Origin | None = found
    while at is not None:
        passed.append(at)
        at = came_from[id(at)]
    return found, tuple(passed)


def _is_meant(origin: Origin) -> bool:
    """Whether all causes of an origin are constants."""
    waiting, seen = [origin], {id(origin)}
    while waiting:
        one = waiting.pop()
        if not one.parents and one.how != "constant":
            return False
        for parent in one.parents:
            if id(parent) not in seen:
                seen.add(id(parent))
                waiting.append(parent)
    return True
