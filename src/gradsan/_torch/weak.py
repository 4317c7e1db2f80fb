"""Weak references to storages and tensors that disturb neither their memory nor ``swap_tensors``."""

from __future__ import annotations

import weakref
from types import ModuleType
from typing import Any

import torch


class weak_storage:  # noqa: N801
    """Weak reference to a storage: does not keep its memory; its ``_cdata`` is not reused meanwhile.

    Missing: never known to have died.
    """

    __slots__ = ("_key",)

    def __init__(self, storage: Any) -> None:
        """Refer to ``storage``."""
        self._key = storage._weak_ref() if hasattr(storage, "_weak_ref") else None

    def expired(self) -> bool:
        """Whether the storage has died."""
        return self._key is not None and bool(torch.UntypedStorage._expired(self._key))

    def has_bytes_of(self, tensor: torch.Tensor, geometry: tuple[Any, ...]) -> bool:
        """Whether the storage has, at the places of ``geometry`` (see :func:`weak_identity`), the bytes of a tensor."""
        offset, shape, strides, size = geometry
        locked = getattr(torch.UntypedStorage, "_new_with_weak_ptr", None)
        storage = None if self._key is None or locked is None else locked(self._key)
        same_form = strides is not None and shape == tuple(tensor.shape) and size == tensor.element_size()
        if storage is None or not same_form or storage.device != tensor.device:
            return False
        with torch.no_grad():
            held = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage, offset, shape, strides)
            now = tensor.detach().contiguous()
            return torch.equal(held.contiguous().view(-1).view(torch.uint8), now.view(-1).view(torch.uint8))

    def __del__(self) -> None:
        """Release the weak reference, and with it the number."""
        if self._key is not None:
            torch.UntypedStorage._free_weak_ref(self._key)


class weak_tensor(weakref.ref[Any]):  # noqa: N801
    """A weak reference to a tensor that ``torch.utils.swap_tensors`` accepts; it refuses tensors with any other."""

    __slots__ = ()


class WeakTensors:
    """Weakly referenced tensors, by number."""

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: dict[int, weak_tensor] = {}

    def get(self, number: int) -> torch.Tensor | None:
        """Return the live tensor with this number, or None."""
        known = self._known.get(number)
        return None if known is None else known()

    def set(self, number: int, tensor: torch.Tensor) -> None:
        """Store a tensor under a number."""
        known = self._known

        def forget(gone: weakref.ref[Any]) -> None:
            if known.get(number) is gone:
                del known[number]

        known[number] = weak_tensor(tensor, forget)

    def values(self) -> list[torch.Tensor]:
        """Return the live tensors."""
        return [one for known in list(self._known.values()) if (one := known()) is not None]

    def clear(self) -> None:
        """Forget all tensors."""
        self._known.clear()


class _Weakref(ModuleType):
    """Stand-in for the module ``weakref`` in ``swap_tensors``, which hides :class:`weak_tensor`."""

    def __getattr__(self, name: str) -> Any:
        return getattr(weakref, name)

    @staticmethod
    def getweakrefs(one: Any) -> list[Any]:
        return [each for each in weakref.getweakrefs(one) if type(each) is not weak_tensor]


def weak_references_of_swaps() -> tuple[Any, str, Any] | None:
    """Return (owner, name, replacement) of the module that ``swap_tensors`` reads. Missing: None, and it sees all."""
    return (torch.utils, "weakref", _Weakref("weakref")) if getattr(torch.utils, "weakref", None) is weakref else None
