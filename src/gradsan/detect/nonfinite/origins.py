"""Origins of non-finite results: the operation that made each, their chain; facts about a tensor with NaN or Inf."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from gradsan import _torch
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


def arguments_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield (position or keyword, tensor) of every tensor argument of a call."""
    for position, value in enumerate(args):
        for one in _torch.tensors_in(value, 1):
            yield str(position), one
    for name, value in kwargs.items():
        for one in _torch.tensors_in(value, 1):
            yield name, one


def scalars_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield (position or keyword, number) of every plain number among the arguments of a call."""
    for name, value in (*((str(position), one) for position, one in enumerate(args)), *kwargs.items()):
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            yield name, float(value)


def kind_of(number: Any) -> NonFiniteValue | None:
    """Return which non-finite value a number is, None for a finite one; for a complex number the worse part."""
    if isinstance(number, complex):
        kinds = (kind_of(number.real), kind_of(number.imag))
        return "nan" if "nan" in kinds else kinds[0] or kinds[1]
    if number != number:
        return "nan"
    return "inf" if number == float("inf") else "-inf" if number == float("-inf") else None


class Searched:
    """Facts about a tensor with non-finite elements, searched once: their kinds, the first index, their number."""

    def __init__(self, tensor: torch.Tensor) -> None:
        """Search ``tensor``, which must have such an element; modes and wrappers must be off."""
        # A device may lack operators, or free memory.
        values = tensor.detach().cpu()
        bad = ~torch.isfinite(values)
        flat = bad.reshape(-1)
        first = int(flat.to(torch.uint8).argmax()) if flat.numel() else 0
        self.elements, self.of = int(bad.sum()), values.numel()
        self.shape, self.device = tuple(values.shape), str(tensor.device)
        self.dtype = str(values.dtype).removeprefix("torch.")
        self.index = unravelled(first, self.shape)
        self.has_nan = bool(torch.isnan(values).any())
        self.has_inf = not values.is_complex() and bool(torch.isposinf(values).any())
        self.value: NonFiniteValue = kind_of(_torch.number(values[self.index])) or "nan"


def unravelled(position: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the index of the element at ``position`` of a tensor of ``shape``, counted row by row."""
    index: list[int] = []
    for size in reversed(shape):
        index.insert(0, position % size)
        position //= size
    return tuple(index)


def operands_of(
    named: Iterable[tuple[str, Any]], index: tuple[int, ...], shape: tuple[int, ...]
) -> tuple[Operand, ...]:
    """Return the floating-point operands, with their elements that made element ``index`` of the result."""
    return tuple(_operand(argument, tensor, index, shape) for argument, tensor in named if tensor.dtype != torch.bool)


def _operand(argument: str, tensor: torch.Tensor, index: tuple[int, ...], shape: tuple[int, ...]) -> Operand:
    values = tensor.detach().cpu()
    where = _broadcast_index(tuple(values.shape), index, shape)
    finite = values[torch.isfinite(values)] if _torch.can_be_nonfinite(values) else values
    is_ordered = finite.numel() > 0 and not finite.is_complex()
    number = None if where is None else _torch.number(values[where])
    return Operand(
        argument,
        tuple(values.shape),
        str(values.dtype).removeprefix("torch."),
        str(tensor.device),
        index=where,
        at=f"{number:.6g}" if isinstance(number, float) else None if number is None else str(number),
        low=float(finite.min()) if is_ordered else None,
        high=float(finite.max()) if is_ordered else None,
        kind=None if not _torch.is_nonfinite(values) else "nan" if bool(torch.isnan(values).any()) else "inf",
    )


def _broadcast_index(shape: tuple[int, ...], index: tuple[int, ...], result: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the index in an operand of ``shape`` that broadcasts to ``index``; None where it does not fit."""
    if len(shape) > len(result):
        return None
    pairs = list(zip(shape, result[len(result) - len(shape) :], strict=True))
    if any(size not in (1, whole) for size, whole in pairs):
        return None
    kept = index[len(result) - len(shape) :]
    return tuple(0 if size == 1 else at for (size, _), at in zip(pairs, kept, strict=True))
