"""Weak references to tensors, by which ``torch.utils.swap_tensors`` does not know that anybody looks at them."""

from __future__ import annotations

import weakref
from types import ModuleType
from typing import Any

import torch.utils


class weak_tensor(weakref.ref[Any]):  # noqa: N801
    """A weak reference to a tensor; others refuse the program's swaps, as ``Module.to`` makes of wrapper subclasses."""

    __slots__ = ()


class WeakTensors:
    """Tensors by numbers, as long as they live."""

    __slots__ = ("_known",)

    def __init__(self) -> None:
        """Start with none."""
        self._known: dict[int, weak_tensor] = {}

    def get(self, number: int) -> Any:
        """The tensor with this number; None where there is none, or none any more."""
        known = self._known.get(number)
        return None if known is None else known()

    def set(self, number: int, tensor: Any) -> None:
        """Give a tensor a number."""
        known = self._known

        def forget(gone: weakref.ref[Any]) -> None:
            if known.get(number) is gone:
                del known[number]

        known[number] = weak_tensor(tensor, forget)

    def values(self) -> list[Any]:
        """Those that live."""
        return [one for known in list(self._known.values()) if (one := known()) is not None]

    def clear(self) -> None:
        """Forget all."""
        self._known.clear()


class _Weakref(ModuleType):
    """The module ``weakref`` as ``swap_tensors`` is to see it."""

    def __getattr__(self, name: str) -> Any:
        return getattr(weakref, name)

    @staticmethod
    def getweakrefs(one: Any) -> list[Any]:
        return [each for each in weakref.getweakrefs(one) if type(each) is not weak_tensor]


def weak_references_of_swaps() -> tuple[Any, str, Any] | None:
    """(owner, name, replacement) of what ``swap_tensors`` asks for weak references. Missing: None, and it meets all."""
    return (torch.utils, "weakref", _Weakref("weakref")) if getattr(torch.utils, "weakref", None) is weakref else None
