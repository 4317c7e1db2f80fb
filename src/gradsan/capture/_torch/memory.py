"""Storages: their identity, their life, copies on write."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef


def weak_identity(tensor: Any) -> tuple[int, int | None, tuple[Any, ...]]:
    """(storage, version, geometry) for tensors without an ordinary storage or version (sparse, inference, nested)."""
    try:
        version = tensor._version
    except RuntimeError:
        version = None
    try:
        storage = tensor.untyped_storage()._cdata
        geometry: tuple[Any, ...] = (
            tensor.storage_offset(),
            tuple(tensor.shape),
            tensor.stride(),
            tensor.element_size(),
        )
    except (RuntimeError, NotImplementedError):
        storage, geometry = storage_identity(tensor), (0, tuple(tensor.shape), None, 1)
    return storage, version, geometry


def storage_identity(tensor: Any) -> int:
    """A number that two tensors share while they share memory. Sparse tensors: that of their values."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):
        pass
    try:
        if tensor.layout is torch.sparse_coo:
            return int(tensor._values().untyped_storage()._cdata)
        return int(tensor.values().untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError, AttributeError):
        return int(tensor._cdata)


def storage_or_none(tensor: Any) -> int:
    """The identity of an ordinary storage, 0 where the tensor has none (sparse, nested)."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):
        return 0


class weak_storage:  # noqa: N801
    """Whether a storage still lives, told without keeping its memory; its ``_cdata`` is not given away meanwhile.

    Missing: never known to have died.
    """

    __slots__ = ("_key",)

    def __init__(self, storage: Any) -> None:
        """Look at ``storage`` from now on."""
        self._key = storage._weak_ref() if hasattr(storage, "_weak_ref") else None

    def expired(self) -> bool:
        """Whether it has died."""
        return self._key is not None and bool(torch.UntypedStorage._expired(self._key))

    def __del__(self) -> None:
        """Let go of the number."""
        if self._key is not None:
            torch.UntypedStorage._free_weak_ref(self._key)


_lazy_clone: Callable[[Any], Any] | None = getattr(torch, "_lazy_clone", None)


_is_cow: Callable[[Any], bool] = getattr(torch._C, "_is_cow_tensor", lambda _: False)


def can_be_cloned_lazily(tensor: Any) -> bool:
    """Whether a copy-on-write clone of a tensor is sound: CPU memory of torch's own, known to no other process.

    Memory that came from outside (``from_numpy``, ``frombuffer``, DLPack) cannot be resized. Missing: always copied.
    """
    if _lazy_clone is None or tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        return False
    if type(tensor) is not torch.Tensor or tensor.is_inference():
        return False
    try:
        storage = tensor.untyped_storage()
        return bool(storage.resizable()) and not storage.is_shared()
    except (RuntimeError, NotImplementedError):
        return False


def lazy_clone(tensor: Any) -> Any:
    """A copy-on-write clone; an ordinary one where torch refuses."""
    assert _lazy_clone is not None
    try:
        return _lazy_clone(tensor)
    except RuntimeError:
        return tensor.clone()


def give_own_memory(holder: Any) -> None:
    """Let a tensor, or a storage, share its memory with no lazy clone any more.

    Torch cannot resize memory that is shared so: the next write fails within it (``c10/core/impl/COW.cpp``, 2.13).
    """
    with contextlib.suppress(RuntimeError, NotImplementedError):
        storage = holder.untyped_storage() if torch.is_tensor(holder) else holder
        # Asking a storage for its pointer is asking for memory to write to.
        storage.data_ptr()


def same_memory(one: Any, other: Any) -> bool:
    """Whether two tensors still share their memory copy-on-write. Missing ``const_data_ptr``: not known, False."""
    if not (_is_cow(one) and _is_cow(other)) or not hasattr(one, "const_data_ptr"):
        return False
    return bool(one.const_data_ptr() == other.const_data_ptr())


def memory_of(tensor: Any) -> tuple[int, int]:
    """(address, bytes) of the whole storage of a tensor, asked for without asking for memory to write to.

    Missing ``const_data_ptr``: memory shared copy-on-write is counted as if it were not.
    """
    storage = tensor.untyped_storage()
    pointer = tensor.const_data_ptr() if hasattr(tensor, "const_data_ptr") else int(storage._cdata)
    return int(pointer) - tensor.storage_offset() * tensor.element_size(), int(storage.nbytes())


def storage_reference(tensor: Any) -> Any:
    """Something that tells whether the storage of a tensor still lives, without keeping it; None where it has none."""
    try:
        return StorageWeakRef(tensor.untyped_storage())
    except (RuntimeError, NotImplementedError):
        return None


def is_gone(reference: Any) -> bool:
    """Whether the storage behind a :func:`storage_reference` has been freed."""
    return bool(reference.expired())


def use_count(tensor: Any) -> int | None:
    """How many hold a tensor, beside Python, which counts once. Missing: None."""
    count = getattr(tensor, "_use_count", None)
    return None if count is None else int(count())
