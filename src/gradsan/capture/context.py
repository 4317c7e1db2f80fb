"""What hangs on the ``ctx`` of a custom Function, as far as its backward reads it."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch

from gradsan.capture import _torch
from gradsan.capture.reads import functions_of, getattr_static, reads_of, values_read

_DEEPEST, _ITEMS = 3, 64
_NO_HOLDERS = (torch.nn.Module, ModuleType, FunctionType, type)
"""What has state of its own that changes while it is used, parameters above all, or none at all."""


def kept_tensors(kind: Any, attributes: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Of what a Function keeps on ``ctx``, the tensors whose values its backward reads, each with its path.

    They are looked for in lists, tuples and dicts, and in the attributes of an object that backward reads by name.
    """
    names, codes = _read_of_context(kind), _codes_of_backward(kind)
    for name, value in attributes.items():
        if names is None or name in names:
            yield from _tensors_in(name, value, codes)


def holds(attributes: dict[str, Any], tensor: Any) -> bool:
    """Whether a tensor still hangs there."""
    return any(one is tensor for _, one in _tensors_in("", attributes, None))


def _tensors_in(
    path: str, value: Any, codes: tuple[CodeType, ...] | None, depth: int = 0, is_inside: bool = False
) -> Iterator[tuple[str, Any]]:
    if _torch.is_tensor(value):
        yield path, value
    elif depth >= _DEEPEST:
        return
    elif isinstance(value, (list, tuple, dict)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in list(items)[:_ITEMS]:
            yield from _tensors_in(f"{path}[{key!r}]", item, codes, depth + 1, is_inside)
    elif not is_inside:
        for name, item in _attributes_of(value):
            if codes is None or any(values_read(code, name) for code in codes):
                yield from _tensors_in(f"{path}.{name}", item, codes, depth + 1, True)


def _attributes_of(value: Any) -> list[tuple[str, Any]]:
    """The first attributes of an object of the program's; nothing is run for it: slots as their class keeps them."""
    kind: Any = type(value)
    if kind.__module__.partition(".")[0] in ("builtins", "torch") or isinstance(value, _NO_HOLDERS):
        return []
    own = getattr_static(kind, "__dict__")
    found = [] if own is None else list(own.__get__(value, kind).items())[:_ITEMS]
    for name in getattr_static(kind, "__slots__") or ():
        slot = getattr_static(kind, name) if isinstance(name, str) else None
        if isinstance(slot, _MEMBER) and len(found) < _ITEMS:
            try:
                found.append((name, slot.__get__(value, kind)))
            except AttributeError:
                continue
    return found


class _Slotted:
    __slots__ = ("one",)


_MEMBER = type(_Slotted.one)  # type: ignore[attr-defined]


@functools.lru_cache(maxsize=1024)
def _codes_of_backward(kind: Any) -> tuple[CodeType, ...]:
    functions = [one for name in ("backward", "vjp") for one in functions_of(getattr_static(kind, name))]
    return tuple(one.__code__ for one in functions if one.__module__.partition(".")[0] != "torch")


@functools.lru_cache(maxsize=1024)
def _read_of_context(kind: Any) -> frozenset[str] | None:
    """The attributes of ``ctx`` whose values the backward of a Function reads; None where that cannot be told."""
    names: set[str] = set()
    codes = _codes_of_backward(kind)
    for code in codes:
        context = code.co_varnames[0] if code.co_argcount else None
        found = reads_of(code).own.get(context, frozenset()) if context is not None else None
        if found is None:
            return None
        names |= {name for name in found if values_read(code, name)}
    return frozenset(names) if codes else None
