"""Storages: their identity, bytes, copy-on-write clones and lent memory."""

from __future__ import annotations

import contextlib
import ctypes
import os
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from gradsan._torch.kinds import as_stored, dispatches, has_elements, shape_of
from gradsan._torch.modes import PLAIN_TENSORS, is_tracing, is_transformed


def weak_identity(tensor: torch.Tensor) -> tuple[int, int | None, tuple[Any, ...]]:
    """Return (storage, version, geometry) of any tensor, without an operator: also sparse, inference, nested, traced.

    A class that dispatches may do so for sizes and strides, too, and ``torch.jit.trace`` records who asks for sizes, so
    such tensors count as covering their whole storage.
    """
    try:
        version = tensor._version
    except RuntimeError:
        version = None
    try:
        storage = tensor.untyped_storage()
        if dispatches(type(tensor)) or is_tracing():
            return int(storage._cdata), version, _whole(storage)
        geometry: tuple[Any, ...] = (
            tensor.storage_offset(),
            tuple(tensor.shape),
            tensor.stride(),
            tensor.element_size(),
        )
        return int(storage._cdata), version, geometry
    except RuntimeError:
        shape = shape_of(tensor) if _is_sparse(tensor) else ()
        return storage_identity(tensor), version, (0, shape, None, 1)


def _whole(storage: Any) -> tuple[Any, ...]:
    """Return the geometry of all bytes of a storage; an unknown one where their number is symbolic."""
    size = storage.nbytes()
    return (0, (size,), (1,), 1) if type(size) is int else (0, (), None, 1)


def storage_identity(tensor: torch.Tensor) -> int:
    """Return a number that two tensors share while they share memory. Sparse tensors: that of their values.

    Torch returns the values of a sparse tensor by an operator only. It is not called where the program could notice:
    in a mode of its own, in a transform, under the profiler. Then the number is that of the tensor.
    """
    try:
        return int(tensor.untyped_storage()._cdata)
    except RuntimeError:
        pass
    if _is_sparse(tensor) and not _modes_entered() and not is_transformed() and not is_profiled():
        try:
            values = tensor._values() if tensor.layout is torch.sparse_coo else tensor.values()
            return int(values.untyped_storage()._cdata)
        except RuntimeError:
            pass
    return int(tensor._cdata)


def _is_sparse(tensor: torch.Tensor) -> bool:
    return type(tensor) in PLAIN_TENSORS and tensor.layout is not torch.strided and not tensor.is_nested


# Missing: assumed true; the values of sparse tensors have no number, losses are not checked.
_modes_entered: Callable[[], int] = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 1)
is_profiled: Callable[[], bool] = getattr(torch._C._autograd, "_profiler_enabled", lambda: True)


def free_memory(device: torch.device) -> int | None:
    """Return the free bytes of a device, with those its allocator holds unused; None if unknown."""
    module: Any = getattr(torch, device.type, None)
    try:
        free = int(module.mem_get_info(device)[0])
        return free + int(module.memory_reserved(device) - module.memory_allocated(device))
    except (AttributeError, RuntimeError):
        return None


def storage_or_none(tensor: torch.Tensor) -> int:
    """Return the identity of an ordinary storage; 0 where the tensor has none (sparse, nested)."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except RuntimeError:
        return 0


_lazy_clone: Callable[[Any], Any] | None = getattr(torch, "_lazy_clone", None)


_is_cow: Callable[[Any], bool] = getattr(torch._C, "_is_cow_tensor", lambda _: False)


# The address of a tensor's storage, without requesting writable memory. Missing: addresses are unknown.
_address: Callable[[Any], int] | None = getattr(torch._C, "_data_address", None)


def can_be_cloned_lazily(tensor: torch.Tensor) -> bool:
    """Whether a copy-on-write clone of a tensor with elements is sound: CPU memory of torch's own, of this process.

    Foreign memory (``from_numpy``, ``frombuffer``, DLPack) cannot be resized. Missing: always copied.
    """
    if _lazy_clone is None or not tensor.is_cpu or tensor.is_inference():
        return False
    try:
        storage = tensor.untyped_storage()
        return bool(storage.resizable()) and not storage.is_shared()
    except RuntimeError:
        return False


def lazy_clone(tensor: torch.Tensor) -> Any:
    """Return a copy-on-write clone; an ordinary one where torch refuses."""
    assert _lazy_clone is not None
    try:
        return _lazy_clone(tensor)
    except RuntimeError:
        return tensor.clone()


# Torch's originals: the wrappers in their places log them as operations of the program.
detached: Callable[[Any], Any] = getattr(torch._C, "TensorBase", torch.Tensor).detach
_as_strided: Callable[..., Any] = getattr(torch._C, "TensorBase", torch.Tensor).as_strided
_over_buffer: Callable[..., Any] = torch.frombuffer
_writable_pointer: Callable[[Any], int] = torch.UntypedStorage.data_ptr
_from_dlpack: Callable[[Any], Any] | None = getattr(torch._C, "_from_dlpack", None)

# The number types of DLPack: (code, bits).
DLPACK_TYPES = {
    torch.float16: (2, 16),
    torch.float32: (2, 32),
    torch.float64: (2, 64),
    torch.bfloat16: (4, 16),
    torch.complex64: (5, 64),
    torch.complex128: (5, 128),
    torch.bool: (6, 8),
    torch.uint8: (1, 8),
    torch.int8: (0, 8),
    torch.int16: (0, 16),
    torch.int32: (0, 32),
    torch.int64: (0, 64),
}


def _capsules() -> Callable[..., Any] | None:
    """Return the function that makes a DLPack capsule; None without the C extension (buffer protocol instead)."""
    if os.environ.get("GRADSAN_NATIVE", "1") == "0" or _from_dlpack is None:
        return None
    try:
        from gradsan.record._native import lend
    except ImportError:
        return None
    return lend


_lend = _capsules()

_memory_at: Callable[[int, int, int], memoryview] = ctypes.PYFUNCTYPE(
    ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int
)(("PyMemoryView_FromMemory", ctypes.pythonapi))
_WRITABLE = 0x200  # PyBUF_WRITE

_held: dict[int, tuple[Any, Any]] = {}
"""Memory lent by the buffer protocol, by the identity of its view: a weak reference to that, and the owner."""


class _StandsFor:
    """Owner of lent memory that graphs made within a backward may save: its tensor in the program's memory."""

    __slots__ = ("__weakref__", "owner", "shift", "storage", "tensor")

    def __init__(self, tensor: torch.Tensor, owner: Any) -> None:
        self.tensor, self.owner, self.storage, self.shift = tensor, owner, 0, 0

    def __del__(self) -> None:
        lent_storages.pop(self.storage, None)


lent_storages: dict[int, weakref.ref[_StandsFor]] = {}
"""The owners of lent memory by storage, while they live."""


def without_sharing(tensor: torch.Tensor, owner: Any) -> Any:
    """Return :func:`lent` memory where the storage of ``tensor`` is shared copy-on-write; else ``tensor`` itself.

    ``owner`` None: a lazy clone is made.
    """
    if _address is None or not tensor.is_cpu or not has_elements(tensor) or not _is_cow(tensor):
        return tensor
    return lent(tensor, lazy_clone(tensor) if owner is None else owner, tensor.is_conj() or tensor.is_neg())


def lent(tensor: torch.Tensor, owner: Any, has_bits: bool = False) -> Any:
    """Return a tensor over the very memory of ``tensor``, whose storage is copy-on-write, in a storage of its own.

    Kernels may request writable memory where they only read. In a shared storage torch then makes a copy; in the
    loop of a parallel kernel it refuses to. ``owner`` is a lazy clone that nobody writes to; it keeps the memory
    while the result lives. ``has_bits``: it is conjugated or negated lazily.
    """
    assert _address is not None
    if not tensor.numel():
        return tensor  # no kernel requests memory of an empty tensor
    stands = _StandsFor(tensor, owner) if torch.is_grad_enabled() else None
    kind = DLPACK_TYPES.get(tensor.dtype)
    if kind is None or _lend is None or _from_dlpack is None or has_bits:
        base, made = _by_buffer(tensor, stands or owner)
    else:
        offset = int(tensor.storage_offset())
        place = _address(tensor) + offset * kind[1] // 8
        base = made = _from_dlpack(_lend(place, tensor.shape, tensor.stride(), *kind, stands or owner))
        if stands is not None:
            stands.shift = offset
    if stands is not None:
        stands.storage = int(base.untyped_storage()._cdata)
        lent_storages[stands.storage] = weakref.ref(stands)
    return made


def _by_buffer(tensor: torch.Tensor, owner: Any) -> tuple[Any, Any]:
    """Lend by the buffer protocol, for want of the C extension or a DLPack type: all the memory, and the tensor."""
    assert _address is not None
    size = int(tensor.untyped_storage().nbytes())
    memory = _memory_at(_address(tensor), size, _WRITABLE)
    base = _over_buffer(memory, dtype=tensor.dtype, count=size // tensor.element_size())
    key = id(memory)
    _held[key] = (weakref.ref(memory, lambda _: _held.pop(key, None)), owner)
    made = _as_strided(base, tensor.shape, tensor.stride(), tensor.storage_offset())
    made = made.conj() if tensor.is_conj() else made
    return base, torch._neg_view(made) if tensor.is_neg() else made


def shared_of(tensor: torch.Tensor) -> Any:
    """Return the view of the program's memory that corresponds to a tensor in lent memory; None for other tensors."""
    if not lent_storages:
        return None
    reference = lent_storages.get(storage_or_none(tensor))
    stands = None if reference is None else reference()
    if stands is None or stands.tensor.dtype != tensor.dtype:
        return None
    if any(one.is_conj() or one.is_neg() for one in (stands.tensor, tensor)):
        return None
    with torch.no_grad():
        return _as_strided(stands.tensor, tensor.shape, tensor.stride(), stands.shift + tensor.storage_offset())


def give_own_memory(holder: Any) -> None:
    """Stop a tensor, or a storage, from sharing its memory with a lazy clone.

    Torch cannot resize memory shared so: the next write fails within it (``c10/core/impl/COW.cpp``, 2.13).
    """
    with contextlib.suppress(RuntimeError):
        storage = holder.untyped_storage() if torch.is_tensor(holder) else holder
        # Reading a storage's pointer requests writable memory. For a fake one, torch warns.
        if storage.device.type != "meta":
            _writable_pointer(storage)


def at_same_address(one: Any, clone: Any, source: Any) -> bool:
    """Whether ``one`` still shares its memory with its lazy clone, and ``source`` (if any) with ``one``.

    Missing ``_data_address``: not known, False.
    """
    if _address is None:
        return False
    try:
        place = _address(one)
        return bool(place == _address(clone) and (source is None or place == _address(source)))
    except RuntimeError:
        return False  # ``source`` has been given memory of another kind


def same_memory(one: Any, other: Any) -> bool:
    """Whether a tensor and its lazy clone still share their memory. Missing ``_data_address``: unknown, False."""
    return _address is not None and bool(_address(one) == _address(other) and _is_cow(one))


def is_at(one: Any, other: Any) -> bool:
    """Whether two tensors are the very same elements. Missing ``_data_address``: False."""
    if _address is None or not has_elements(one) or not has_elements(other) or one.dtype != other.dtype:
        return False
    return bool(_place(one) == _place(other) and one.shape == other.shape and one.stride() == other.stride())


def memory_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return (address, bytes) of the whole storage of a tensor, without requesting writable memory.

    Missing ``_data_address``: copy-on-write memory counts as if it were not shared.
    """
    storage = tensor.untyped_storage()
    return _address(tensor) if _address is not None else int(storage._cdata), int(storage.nbytes())


def _place(tensor: torch.Tensor) -> tuple[int, int]:
    assert _address is not None
    return _address(tensor), int(tensor.storage_offset())


def storage_reference(holder: Any) -> Any:
    """Return a weak reference to a storage, or to that of a tensor; None where there is none.

    Its ``cdata`` is the ``_cdata`` of the storage.
    """
    try:
        return StorageWeakRef(holder.untyped_storage() if torch.is_tensor(holder) else holder.untyped())
    except RuntimeError:
        return None


def is_gone(reference: Any) -> bool:
    """Whether the storage behind a :func:`storage_reference` has been freed."""
    return bool(reference.expired())


def use_count(tensor: torch.Tensor) -> int | None:
    """Return the reference count of a tensor, in which Python counts once. Missing: None."""
    count = getattr(tensor, "_use_count", None)
    return None if count is None else int(count())


def shares_memory(tensor: torch.Tensor) -> bool:
    """Whether a storage is held by more than this tensor and its own object in Python. Missing: False."""
    count = getattr(torch._C, "_storage_Use_Count", None)
    return count is not None and int(count(tensor.untyped_storage()._cdata)) > 2


def numbers_of(scalars: list[Any]) -> list[float]:
    """Return the values of one-element tensors, with one synchronisation for each of their devices."""
    found: dict[int, float] = {}
    for device in dict.fromkeys(one.device for one in scalars):
        places = [place for place, one in enumerate(scalars) if one.device == device]
        values = torch.stack([scalars[place].reshape(()).to(torch.float64) for place in places]).tolist()
        found.update(zip(places, values, strict=True))
    return [found[place] for place in range(len(scalars))]


def bytes_of(tensor: torch.Tensor) -> Any:
    """Return a copy of the bytes that a tensor has in memory."""
    return as_stored(tensor).clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def own_bytes(tensor: torch.Tensor) -> Any:
    """Return the bytes that a tensor has in memory, to be compared at once: no copy, where it is contiguous."""
    flat = as_stored(tensor).contiguous().reshape(-1)
    # One element is contiguous whatever its stride, which a view of another element size does not take.
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)
