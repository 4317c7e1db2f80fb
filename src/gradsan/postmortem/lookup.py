"""Lookup of names, attributes and elements in the post-mortem analysis, without running the program's code."""

from __future__ import annotations

import ast
import builtins
import itertools
import types
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from gradsan import _torch
from gradsan.graph.live import own_attribute

NUMBERS = (int, float, complex, bool, str, bytes, type(None))
"""Types of values without an identity of their own."""

_TENSOR_VIEWS = frozenset({"data", "T", "mT", "H", "mH", "real", "imag"})


def name(space: Namespace, text: str) -> Value:
    """The variable ``text``: its analysed value, else that of the live frame, of the module, of Python."""
    at: Namespace | None = space
    while at is not None:
        if text in at.names:
            return at.names[text]
        if text in at.live:
            return of_thing(at.live[text])
        at = at.outer
    module = space.module
    if module is not None:
        if text in module.names:
            return module.names[text]
        if text in module.live:
            return of_thing(module.live[text])
    return Value(getattr(builtins, text)) if hasattr(builtins, text) else Value()


def attribute(owner: Value, text: str) -> Value:
    """The attribute ``text`` of ``owner``; an unknown owner's is taken for a tensor's."""
    if owner.attributes is not None and text in owner.attributes:
        return owner.attributes[text]
    if owner.may_be_tensor:
        if text in _TENSOR_VIEWS:
            return Value(memory=owner.memory)
        return Value(TensorMethod(text, owner))
    if owner.kind is not None and not owner.is_known:
        found = _of_class(owner.kind, text)
        return Value(TensorMethod(text, owner)) if found is UNKNOWN else _bound(found, owner)
    if not owner.is_known:
        return Value(TensorMethod(text, owner))
    thing = owner.thing
    if isinstance(thing, list | tuple | dict | set):
        return Value(TensorMethod(text, owner))
    if isinstance(thing, types.ModuleType):
        return of_thing(vars(thing).get(text, UNKNOWN)) if text in vars(thing) else Value()
    if isinstance(thing, type):
        found = _of_class(thing, text)
        plain = found.__func__ if isinstance(found, staticmethod) else found
        if isinstance(plain, classmethod):
            return Value(Bound(plain.__func__, owner))
        if text == "apply" and issubclass(thing, torch.autograd.Function):
            return Value(Bound(plain, owner))
        return Value() if plain is UNKNOWN else of_thing(plain)
    own = own_attribute(thing, text, UNKNOWN)
    if own is not UNKNOWN:
        return of_thing(own)
    found = _of_class(type(thing), text)
    return Value(TensorMethod(text, owner)) if found is UNKNOWN else _bound(found, owner)


def _of_class(kind: Any, text: str) -> Any:
    for one in getattr(kind, "__mro__", ()):
        if text in vars(one):
            return vars(one)[text]
    return UNKNOWN


def of_parent(space: Namespace, text: str) -> Value:
    """``super().text``: the next method in the MRO of ``self``."""
    at: Namespace | None = space
    while at is not None and "self" not in at.names:
        at = at.outer
    if at is None:
        return Value()
    owner = at.names["self"]
    kind = type(owner.thing) if owner.is_known else owner.kind
    name = at.qualname.rpartition(".")[0].rpartition(".")[2]
    order = list(getattr(kind, "__mro__", ()))
    behind = next((place for place, one in enumerate(order) if one.__name__ == name), len(order))
    for one in order[behind + 1 :]:
        if text in vars(one):
            return _bound(vars(one)[text], owner)
    return Value()


def _bound(found: Any, owner: Value) -> Value:
    if isinstance(found, staticmethod):
        return of_thing(found.__func__)
    if isinstance(found, classmethod):
        return Value(Bound(found.__func__, Value(owner.kind or type(owner.thing))))
    if isinstance(found, property):
        return Value(Bound(found, owner))
    if isinstance(found, types.FunctionType):
        return Value(Bound(found, owner))
    if callable(found):
        return Value(TensorMethod(getattr(found, "__name__", "?"), owner)) if not owner.is_known else of_thing(found)
    return of_thing(found)


def element(owner: Value, key: Any) -> Value:
    """An element of a container by a constant key, or any element where the key is not known."""
    thing = owner.thing
    if isinstance(thing, nn.ModuleList | nn.Sequential):
        thing = list(thing.children())
    if isinstance(thing, nn.ModuleDict | nn.ParameterDict):
        thing = dict(thing.items())
    if isinstance(thing, nn.ParameterList):
        thing = list(thing)
    if isinstance(thing, list | tuple | dict):
        try:
            if key is not UNKNOWN:
                return of_thing(thing[key])
        except (KeyError, IndexError, TypeError):
            return Value()
        values = [of_thing(one) for one in list(thing.values() if isinstance(thing, dict) else thing)[:64]]
        return any_of(values)
    return Value()


def any_of(values: list[Value]) -> Value:
    """One value for all elements of a container: their memory, and the one object that they may be."""
    if not values:
        return Value()
    memory = frozenset().union(*(value.memory for value in values))
    first = values[0]
    if first.may_be_tensor:
        return Value(memory=memory)
    if len(values) > 1 and all(is_optimizer(value.thing) for value in values):
        updated = frozenset().union(*(memory_in_groups(value.thing) for value in values))
        return Value(attributes={"params": Value(memory=updated)}, kind=type(first.thing))
    rows = [value.items for value in values if value.items is not None]
    if len(rows) == len(values) > 1 and len({len(row) for row in rows}) == 1:
        return Value(memory=memory, items=[any_of(list(column)) for column in zip(*rows, strict=True)])
    return Value(first.thing, memory, first.items, first.attributes, first.kind)


def is_optimizer(thing: Any) -> bool:
    """Whether a live object is an optimizer."""
    return isinstance(thing, torch.optim.Optimizer)


def memory_in_groups(optimizer: Optimizer) -> frozenset[int]:
    """The storages of the parameters that an optimizer updates."""
    parameters = _torch.parameters_of(optimizer)
    return frozenset(memory for one in parameters for memory in of_thing(one).memory)


def live_instead(live: Any, value: Value) -> Value:
    """The object in a live variable, where it may be the assigned one; tensors are short-lived."""
    if live is UNKNOWN or isinstance(live, NUMBERS):
        return value
    if value.is_known and is_optimizer(value.thing):
        return value  # a loop over optimizers leaves the last one in its variable
    if torch.is_tensor(live):
        return of_thing(live) if not value.is_known and _is_lasting_leaf(live) else value
    if isinstance(live, list | tuple | dict):
        return of_thing(live) if _lasts(live) else value
    return of_thing(live)


def _is_lasting_leaf(tensor: torch.Tensor) -> bool:
    try:
        return bool(tensor.is_leaf and tensor.requires_grad)
    except RuntimeError:
        return False  # a view on which autograd raises, because its base was written


def _lasts(container: Any) -> bool:
    """Whether a live container holds no result of a computation, so that it may be the one that was made at first."""
    inner = list(container.values()) if isinstance(container, dict) else list(container)
    return bool(inner) and not any(
        isinstance(one, NUMBERS) or (torch.is_tensor(one) and not _is_lasting_leaf(one)) for one in inner[:64]
    )


class _Unknown:
    def __repr__(self) -> str:
        return "UNKNOWN"


UNKNOWN: Final[Any] = _Unknown()
"""The ``thing`` of a value without a known live object."""

_imagined = itertools.count(-1, -1)


@dataclass(slots=True, eq=False)
class Value:
    """A possible value of an expression.

    ``thing`` is the live object, ``UNKNOWN`` where there is none. ``memory`` are its possible storages: real ones
    by :func:`gradsan._torch.storage_identity`, those invented by the analysis by negative numbers. ``items`` are
    the elements of a container that the analysis has seen made, ``attributes`` those of an object.
    """

    thing: Any = UNKNOWN
    memory: frozenset[int] = frozenset()
    items: list[Value] | None = None
    attributes: dict[str, Value] | None = None
    kind: Any = None

    @property
    def is_known(self) -> bool:
        """Whether it is a live object."""
        return self.thing is not UNKNOWN

    @property
    def may_be_tensor(self) -> bool:
        """Whether it may be a tensor: a live one, or a new value that is neither a container nor an object."""
        if self.is_known:
            return bool(torch.is_tensor(self.thing))
        return self.items is None and self.attributes is None


@dataclass(frozen=True, slots=True, eq=False)
class Closure:
    """A function whose definition was analysed: its syntax, its place, and the variables around it."""

    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
    scope: Any
    qualname: str


@dataclass(frozen=True, slots=True, eq=False)
class Bound:
    """A method and its receiver."""

    function: Any
    owner: Value


@dataclass(frozen=True, slots=True, eq=False)
class TensorMethod:
    """A method of a tensor, by name."""

    name: str
    owner: Value


@dataclass(slots=True, eq=False)
class Namespace:
    """The variables of a function or module under analysis; ``live`` are those of its frame, if it exists."""

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
    """One value for any of several."""
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
    """The memory of a value and of its elements."""
    found = value.memory
    if depth and value.items is not None:
        found = found.union(*(memory_in(item, depth - 1) for item in value.items))
    if depth and value.is_known and isinstance(value.thing, list | tuple | dict):
        inner = value.thing.values() if isinstance(value.thing, dict) else value.thing
        found = found.union(*(memory_in(of_thing(item), depth - 1) for item in list(inner)[:64]))
    return found
