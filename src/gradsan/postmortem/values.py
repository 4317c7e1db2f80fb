"""Values of expressions in a post-mortem reading: a live object, or memory that was made meanwhile."""

from __future__ import annotations

import ast
import itertools
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from gradsan import _torch


class _Unknown:
    def __repr__(self) -> str:
        return "UNKNOWN"


UNKNOWN: Final[Any] = _Unknown()
"""The ``thing`` of a value of which no live object is known."""

_imagined = itertools.count(-1, -1)


@dataclass(slots=True, eq=False)
class Value:
    """What an expression may stand for.

    ``thing`` is the live object, ``UNKNOWN`` where there is none. ``memory`` are the storages it may lie in: real ones
    by :func:`gradsan._torch.storage_identity`, those that reading made up by negative numbers. ``items`` are
    the elements of a container that reading has seen made, ``attributes`` those of an object.
    """

    thing: Any = UNKNOWN
    memory: frozenset[int] = frozenset()
    items: list[Value] | None = None
    attributes: dict[str, Value] | None = None
    kind: Any = None

    @property
    def is_known(self) -> bool:
        """Whether a live object stands behind it."""
        return self.thing is not UNKNOWN

    @property
    def may_be_tensor(self) -> bool:
        """Whether it may be a tensor: a live one, or anything made meanwhile that is no container and no object."""
        if self.is_known:
            return bool(torch.is_tensor(self.thing))
        return self.items is None and self.attributes is None


@dataclass(frozen=True, slots=True, eq=False)
class Closure:
    """A function that reading has seen defined: its syntax, where it stands, and the variables around it."""

    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
    scope: Any
    qualname: str


@dataclass(frozen=True, slots=True, eq=False)
class Bound:
    """A method and what it is called on."""

    function: Any
    owner: Value


@dataclass(frozen=True, slots=True, eq=False)
class TensorMethod:
    """A method of a tensor, by name."""

    name: str
    owner: Value


@dataclass(slots=True, eq=False)
class Namespace:
    """The variables of a function or module while it is read; ``live`` are those of its frame, if that is there."""

    file: str
    qualname: str
    names: dict[str, Value] = field(default_factory=dict)
    live: dict[str, Any] = field(default_factory=dict)
    outer: Namespace | None = None
    module: Namespace | None = None


def made() -> Value:
    """A new tensor in memory of its own."""
    return Value(memory=frozenset((next(_imagined),)))


def of_thing(thing: Any) -> Value:
    """A live object as a value; a tensor with its memory."""
    if torch.is_tensor(thing):
        try:
            return Value(thing, frozenset((_torch.storage_identity(thing),)))
        except RuntimeError:
            return Value(thing)
    return Value(thing)


def joined(values: list[Value]) -> Value:
    """One value that may be any of several."""
    kept = [value for value in values if not (value.is_known and value.thing is None)] or values
    if not kept:
        return made()
    first = kept[0]
    if all(value is first for value in kept):
        return first
    memory = frozenset().union(*(value.memory for value in kept))
    same = all(value.thing is first.thing for value in kept)
    chosen = next((value for value in kept if value.items is not None or value.attributes is not None), first)
    if same and first.is_known:
        return first
    known = next((value.thing for value in kept if value.is_known and not torch.is_tensor(value.thing)), UNKNOWN)
    if known is not UNKNOWN and not isinstance(known, int | float | str | bool):
        return Value(known, memory, chosen.items, chosen.attributes, chosen.kind)
    return Value(UNKNOWN, memory, chosen.items, chosen.attributes, chosen.kind)


def memory_in(value: Value, depth: int = 3) -> frozenset[int]:
    """The memory of a value and of what it contains."""
    found = value.memory
    if depth and value.items is not None:
        found = found.union(*(memory_in(item, depth - 1) for item in value.items))
    if depth and value.is_known and isinstance(value.thing, list | tuple | dict):
        inner = value.thing.values() if isinstance(value.thing, dict) else value.thing
        found = found.union(*(memory_in(of_thing(item), depth - 1) for item in list(inner)[:64]))
    return found
