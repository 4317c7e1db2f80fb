"""Values out of JSON, each of the kind that the contract says."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar, get_args

_T = TypeVar("_T")


def each(read: Callable[[Any], _T], values: Iterable[Any]) -> tuple[_T, ...]:
    """Return every value as ``read`` reads it."""
    return tuple(read(value) for value in values)


def maybe(read: Callable[[Any], _T], value: Any) -> _T | None:
    """Return the value as ``read`` reads it, None where it is null."""
    return None if value is None else read(value)


def text(value: Any) -> str:
    """Return the value; TypeError where it is no text."""
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value


def whole(value: Any) -> int:
    """Return the value; TypeError where it is no whole number."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{value!r} is no whole number")
    return value


def number(value: Any) -> float:
    """Return the value; TypeError where it is no number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{value!r} is no number")
    return value


def one_of(literal: Any, value: Any) -> Any:
    """Return the value; ValueError where it is no word of ``literal``."""
    if value not in get_args(literal):
        raise ValueError(f"{value!r} is none of {', '.join(get_args(literal))}")
    return value
