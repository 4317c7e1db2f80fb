"""Originals of saved tensors: copy-on-write, or a copy where the memory is known outside of torch.

A lazy clone shares memory until writable memory is requested from torch, including ``.data``, storages and pointers;
then the writer moves. It must not be made of memory that NumPy, DLPack, a pointer or another process already has:
such a writer requests nothing (and after a move would write somewhere else), so there the bytes are copied at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.autograd.graph import Node

from gradsan import _torch
from gradsan.model import ByteChange
from gradsan.record._writer_pure import is_called_from
from gradsan.record.log import Core, RawStack, has_native_core
from gradsan.record.patches import Patches, standing

# Torch's own descriptors: a subclass may have attributes of these names.
_TENSOR: Any = torch.Tensor
_is_leaf, _requires_grad = _TENSOR.is_leaf.__get__, _TENSOR.requires_grad.__get__
_grad_fn, _output_nr, _version = _TENSOR.grad_fn.__get__, _TENSOR.output_nr.__get__, _TENSOR._version.__get__

_HAND_OUT = (
    *((torch.Tensor, name) for name in ("numpy", "__array__", "__dlpack__", "data_ptr", "share_memory_")),
    (torch, "to_dlpack"),
    (torch.utils.dlpack, "to_dlpack"),
)
_STORAGES = (torch.UntypedStorage, torch.TypedStorage)
_RESIZED = ((torch.UntypedStorage, "resize_"), (torch.Tensor, "resize_"), (torch.Tensor, "resize_as_"))


class Storages(Protocol):
    """A set of storages, by their ``_cdata``."""

    @property
    def storages(self) -> Collection[int]:
        """All candidates, some of which may be dead."""

    def holds(self, storage: int, /) -> bool:
        """Whether a storage is in the set."""


class KnownOutside:
    """The live storages whose pointer has been given out."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self.storages: dict[int, Any] = {}
        """A weak reference to each by its ``_cdata``; it may have died since."""

    def install(self, patches: Patches) -> None:
        """Watch the methods that give out a pointer, and those that resize, until ``patches`` is undone."""
        for owner, name in (*_HAND_OUT, *((kind, "data_ptr") for kind in _STORAGES)):
            original = standing(owner, name)
            if original is not None:
                patches.set(owner, name, self._opening(original, owner in _STORAGES))
        read_only = standing(torch.Tensor, "const_data_ptr")
        if read_only is not None:
            patches.set(torch.Tensor, "const_data_ptr", self._opening_as_it_is(read_only))
        for owner, name in _RESIZED:
            resize = standing(owner, name)
            if resize is not None:
                patches.set(owner, name, self._resizing(resize))

    def holds(self, storage: int) -> bool:
        """Whether the storage with this ``_cdata`` is known outside."""
        reference = self.storages.get(storage)
        if reference is None:
            return False
        if _torch.is_gone(reference):
            del self.storages[storage]
            return False
        return True

    def _opening(self, original: Any, is_of_storage: bool) -> Any:
        folder = _torch.package_folder()

        def opened(_: Any, args: tuple[Any, ...], __: dict[str, Any], ___: Any) -> None:
            # Torch itself uses pointers only to tell storages apart, such as all of a model when it is saved to a file.
            if args and not (is_of_storage and is_called_from(folder, 1)):
                self._note(args[0])

        return self._core.listener(original, None, opened)

    def _opening_as_it_is(self, original: Any) -> Any:
        def opens(args: tuple[Any, ...], _: dict[str, Any]) -> None:
            if args:
                with _torch.hushed():
                    # A pointer for reading must not be to memory shared with a lazy clone: writers move away from that.
                    _torch.give_own_memory(args[0])
                self._note(args[0])

        return self._core.listener(original, opens, None)

    def _note(self, holder: Any) -> None:
        with _torch.hushed():
            storage = _torch.storage_reference(holder)
            if storage is not None:
                self.storages[storage.cdata] = storage

    def _resizing(self, resize: Any) -> Any:
        def resizes(args: tuple[Any, ...], _: dict[str, Any]) -> None:
            if args:
                with _torch.hushed():
                    _torch.give_own_memory(args[0])

        return self._core.listener(resize, resizes, None)


def cloned(tensor: torch.Tensor) -> Any:
    """Return a copy of a tensor; None where its device has no memory left for one."""
    try:
        return tensor.clone()
    except torch.OutOfMemoryError:
        return None


_SAMPLES = 4
_SAME_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class _SavedFields:
    """The fields of a kept value; documented at :class:`Kept`."""

    __slots__ = (
        *("__weakref__", "_leaf", "alias", "clock", "heals", "hooks", "is_copied", "maker", "original", "output"),
        *("parts", "reported", "requires_grad", "same_at", "source", "stack", "thread", "version", "was_leaf"),
    )


if not TYPE_CHECKING and has_native_core():
    # The C core makes such values, too.
    from gradsan.record._native import SavedFields as _SavedFields


class Kept(_SavedFields):
    """A saved tensor: an alias that shares memory and version counter with it, and its original.

    ``maker`` is the number of the Node that made it, None for a leaf; ``output`` is its output number if the saving
    Node made it, else None. ``is_copied`` says that the original was copied at the save. A tensor without elements of
    its own in ordinary memory (sparse, nested, a subclass) has no original; its version is checked, and ``parts``, the
    kept inner tensors of a wrapper subclass. ``hooks`` are those that the program has registered for this one slot, as
    (result of its pack hook, its unpack hook).
    """

    __slots__ = ()

    def __init__(
        self,
        tensor: torch.Tensor,
        is_known_outside: bool,
        clock: int,
        stack: RawStack,
        thread: int,
        *,
        keeps_original: bool = True,
        shared: Any = None,
        copied: Callable[[Any], Any] = cloned,
    ) -> None:
        """Keep ``tensor`` with its current value. ``stack`` and ``thread`` are those of the operation that saves it.

        ``shared`` is the same elements in the program's own memory, if ``tensor`` is in lent memory. ``copied``
        makes a copy, or returns None.
        """
        self.was_leaf, self.requires_grad = _is_leaf(tensor), _requires_grad(tensor)
        maker = None if self.was_leaf else _grad_fn(tensor)
        # Only its number: the Node may keep this value, so holding the Node would create a reference cycle.
        self.maker = _torch.node_sequence(maker)
        # Except for results, PyTorch keeps the very tensor, and later reads its current state (``tensor.data = …``).
        is_result = maker is not None and _torch.may_be_saving(maker, self.maker)
        has_elements = _torch.has_elements(tensor)
        if shared is not None:
            self.alias = shared
        elif has_elements:
            self.alias = _torch.detached(tensor)
        else:
            self.alias = tensor.detach() if is_result else tensor
        self.version = _version_of(self.alias)
        self.clock, self.stack, self.thread = clock, stack, thread
        self.is_copied = is_known_outside or not has_elements or not _torch.can_be_cloned_lazily(self.alias)
        if not (keeps_original and has_elements):
            self.original = None
        else:
            self.original = copied(self.alias) if self.is_copied else _torch.lazy_clone(self.alias)
        self.parts: tuple[Kept, ...] = ()
        self.reported = 0
        # The clock of the last comparison that found it unchanged; -1 where there was none.
        self.same_at = -1
        self.heals: bool | None = None
        self.hooks: tuple[Any, Any] | None = None
        self.source = None if is_result else _torch.weak_tensor(tensor)
        self.output = _output_nr(tensor) if is_result else None
        # PyTorch itself keeps a leaf alive; a non-leaf may be, undetected, a result of the Node that saves it.
        self._leaf = tensor if self.was_leaf else None

    def forget_source(self) -> None:
        """Refer to the saved memory only, no longer to the tensor."""
        self.source = self._leaf = None

    def set_program_hooks(self, packed: Any, unpack: Any) -> None:
        """Leave the value to the program's own hooks from now on, and keep nothing else."""
        self.hooks, self.original, self.parts = (packed, unpack), None, ()
        self.forget_source()
        self.alias = torch.empty(0)
        self.version = _version_of(self.alias)

    @property
    def is_as_saved(self) -> bool:
        """Whether it is certain, without comparing bytes, that it has not been written since it was saved."""
        if self.is_copied or self.original is None or _version(self.alias) != self.version:
            return False
        source = self.source
        return _torch.at_same_address(self.alias, self.original, None if source is None else source())

    @property
    def very_tensor(self) -> Any:
        """The saved tensor, if it is alive and PyTorch would have kept it; else None."""
        return None if self.source is None else self.source()

    @property
    def is_detached(self) -> bool:
        """Whether the saved tensor has lost its graph by ``detach_()``, so that PyTorch refuses it."""
        if self.was_leaf or self.source is None:
            return False
        source = self.source()
        return source is not None and bool(_is_leaf(source))

    @property
    def current(self) -> Any:
        """The value that PyTorch would give to backward: the saved memory, or its tensor's new memory."""
        source = None if self.source is None else self.source()
        if source is None or _torch.storage_or_none(source) == _torch.storage_or_none(self.alias):
            return self.alias
        return _torch.detached(source)

    @property
    def moved(self) -> bool:
        """Whether the version counter has moved since the save."""
        return self.version != _version_of(self.alias)

    def version_error(self, node: Node) -> str:
        """Return PyTorch's version error for a use of the value by ``node``."""
        number = self.output or 0
        maker = node if self.output is not None else getattr(self.very_tensor, "grad_fn", None)
        return _torch.version_error(self.alias, self.version, maker, number)

    @property
    def changed(self) -> bool:
        """Whether a byte of it has changed (judged by the counter if there is no original)."""
        if self.original is None:
            return self.moved or self.changed_part is not None
        current = self.current
        # Still the same memory: nobody has requested writable memory from torch.
        if current is self.alias and not self.is_copied and _torch.same_memory(current, self.original):
            return False
        return not (self.is_emptied or have_same_bytes(current, self.original))

    @property
    def changed_part(self) -> Kept | None:
        """The first of its parts of which a byte has changed; None if there is none."""
        return next((part for part in self.parts if part.changed), None)

    @property
    def is_emptied(self) -> bool:
        """Whether its memory has been taken away, so that it can be neither read nor compared."""
        return not fits_its_memory(self.alias)

    @property
    def nbytes(self) -> int:
        """The bytes that the original takes once it no longer shares memory."""
        return 0 if self.original is None else self.original.numel() * self.original.element_size()

    def own_memory(self) -> tuple[int, int] | None:
        """Return (address, bytes) of memory that only originals hold; None while the program shares it."""
        if self.original is None or (not self.is_copied and _torch.same_memory(self.alias, self.original)):
            return None
        return _torch.memory_of(self.original)

    def change(self) -> ByteChange | None:
        """Return the elements that differ, with the first few as text; None where that cannot be decided."""
        current = self.current
        if self.original is None or current.shape != self.original.shape or current.dtype != self.original.dtype:
            return None
        # A device may lack operators, or free memory.
        now, before = current.cpu(), self.original.cpu()
        different = _differing(now, before)
        places = torch.nonzero(different)[:_SAMPLES]
        samples = tuple(
            (tuple(place), _shown(before[tuple(place)]), _shown(now[tuple(place)])) for place in places.tolist()
        )
        return ByteChange(int(different.sum()), different.numel(), samples)


def fits_its_memory(tensor: torch.Tensor) -> bool:
    """Whether all elements of a tensor lie within its storage, which ``resize_`` of a storage does not ensure."""
    if not _torch.has_elements(tensor) or not tensor.numel():
        return True
    held = tensor.untyped_storage().nbytes()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return bool(held >= (tensor.storage_offset() + last + 1) * tensor.element_size())


def _version_of(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else int(_version(tensor))


def have_same_bytes(one: Any, other: Any) -> bool:
    """Whether two tensors are equal in shape, dtype and every bit."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    try:
        return torch.equal(as_integers(one), as_integers(other))
    except RuntimeError:
        if one.is_cpu:
            raise
        # The device lacks the operator, or memory for it.
        return torch.equal(as_integers(one.cpu()), as_integers(other.cpu()))


def _differing(one: Any, other: Any) -> Any:
    first, second = as_integers(one), as_integers(other)
    different = first != second
    return different.any(-1) if different.dim() > one.dim() else different


def as_integers(tensor: torch.Tensor) -> Any:
    """Return the bits of a tensor as integers, so that a NaN equals itself."""
    tensor = tensor.resolve_conj().resolve_neg()
    if tensor.dtype == torch.complex128:
        tensor = torch.view_as_real(tensor)
    kind = _SAME_SIZE.get(tensor.element_size())
    return tensor if kind is None or tensor.dtype == torch.bool else tensor.view(kind)


def _shown(element: Any) -> str:
    value = element.item()
    return f"{value:.6g}" if isinstance(value, float) and math.isfinite(value) else str(value)
