"""Originals of saved tensors: copy-on-write, or a copy where memory is known outside of torch.

A lazy clone shares memory until somebody asks torch for writable memory, ``.data``, storages and pointers included;
then the writer moves. It must not be made of memory that NumPy, DLPack, a pointer or another process already knows:
such a writer does not ask (and after a move would write somewhere else), so there the bytes are copied at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, Protocol

import torch

from gradsan import _torch
from gradsan.model import ByteChange
from gradsan.record._writer_pure import caller
from gradsan.record.log import Core, has_native_core
from gradsan.record.patches import Patches, standing

# As torch itself reads them: a subclass may have attributes of these names.
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
    """Some storages, by their ``_cdata``."""

    @property
    def storages(self) -> Collection[int]:
        """All that may be among them."""

    def holds(self, storage: int, /) -> bool:
        """Whether one is among them."""


class KnownOutside:
    """The storages whose pointer somebody has, while they live."""

    def __init__(self, core: Core) -> None:
        """Start with none."""
        self._core = core
        self.storages: dict[int, Any] = {}
        """A reference to each by its ``_cdata``; it may have died since."""

    def install(self, patches: Patches) -> None:
        """Watch the methods by which a pointer is handed out, and those that resize, until ``patches`` is undone."""
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
            # By pointers torch itself only tells storages apart, all of a model's when that is written to a file.
            if args and not (is_of_storage and caller(1).f_code.co_filename.startswith(folder)):
                self._note(args[0])

        return self._core.listener(original, None, opened)

    def _opening_as_it_is(self, original: Any) -> Any:
        def opens(args: tuple[Any, ...], _: dict[str, Any]) -> None:
            if args:
                with _torch.hushed():
                    # Who asks for a pointer to read from is given that of memory which others may be about to leave.
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


def cloned(tensor: Any) -> Any:
    """A copy of a tensor; None where its device has no memory left for one."""
    try:
        return tensor.clone()
    except torch.OutOfMemoryError:
        return None


_SAMPLES = 4
_SAME_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class _SavedFields:
    """The fields of a kept value; :class:`Kept` says what they mean."""

    __slots__ = (
        "__weakref__",
        "_leaf",
        "alias",
        "clock",
        "heals",
        "hooks",
        "is_copied",
        "maker",
        "original",
        "output",
        "parts",
        "reported",
        "requires_grad",
        "same_at",
        "source",
        "stack",
        "thread",
        "version",
        "was_leaf",
    )


if not TYPE_CHECKING and has_native_core():
    # The C core, too, makes such values.
    from gradsan.record._native import SavedFields as _SavedFields


class Kept(_SavedFields):
    """A saved tensor: an alias that shares memory and version counter with it, and its original.

    ``maker`` is the number of the Node that made it, None for a leaf; ``output`` is which result of the saving Node it
    is, None for another value. ``is_copied`` says that the original was copied when it was saved. A tensor without
    elements of its own in ordinary memory (sparse, nested, a subclass) is left alone: it has no original; its version
    is looked at, and ``parts``, what is kept of the tensors that a wrapper subclass holds. ``hooks`` are those that the
    program has registered for this one slot, as (what its pack hook gave, its unpack hook).
    """

    __slots__ = ()

    def __init__(
        self,
        tensor: Any,
        is_known_outside: bool,
        clock: int,
        stack: Any,
        thread: int,
        *,
        keeps_original: bool = True,
        shared: Any = None,
        copied: Callable[[Any], Any] = cloned,
    ) -> None:
        """Keep ``tensor`` as it is now. ``stack`` and ``thread`` are those of the operation that saves it.

        ``shared`` is the same elements in the program's own memory, where ``tensor`` only stands for that. ``copied``
        makes a copy, or None.
        """
        self.was_leaf, self.requires_grad = _is_leaf(tensor), _requires_grad(tensor)
        maker = None if self.was_leaf else _grad_fn(tensor)
        # Its number, because the Node itself would close a circle: it may keep what is kept here.
        self.maker = None if maker is None else _torch.node_sequence(maker)
        # All but results PyTorch keeps as the very tensor, and later reads what that has become (``tensor.data = …``).
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
        # The clock of the last comparison that found it as it was; -1 where there was none.
        self.same_at = -1
        self.heals: bool | None = None
        self.hooks: tuple[Any, Any] | None = None
        self.source = None if is_result else _torch.weak_tensor(tensor)
        self.output = _output_nr(tensor) if is_result else None
        # A leaf PyTorch holds itself; what is no leaf may be, unseen, a result of the Node that saves it.
        self._leaf = tensor if self.was_leaf else None

    def forget_source(self) -> None:
        """What was saved is from now on the memory, not the tensor."""
        self.source = self._leaf = None

    def give_way(self, packed: Any, unpack: Any) -> None:
        """Let the program's own hooks hold the value from now on, and nothing else."""
        self.hooks, self.original, self.parts = (packed, unpack), None, ()
        self.forget_source()
        self.alias = torch.empty(0)
        self.version = _version_of(self.alias)

    @property
    def is_as_saved(self) -> bool:
        """Whether it is certain, without a look at its bytes, that nobody has written it since it was saved."""
        if self.is_copied or self.original is None or _version(self.alias) != self.version:
            return False
        source = self.source
        return _torch.at_same_address(self.alias, self.original, None if source is None else source())

    @property
    def very_tensor(self) -> Any:
        """The tensor that was saved, where it is still there and PyTorch would have kept that; else None."""
        return None if self.source is None else self.source()

    @property
    def is_detached(self) -> bool:
        """Whether the tensor that was saved has lost its graph by ``detach_()``, which PyTorch refuses to use."""
        if self.was_leaf or self.source is None:
            return False
        source = self.source()
        return source is not None and bool(_is_leaf(source))

    @property
    def current(self) -> Any:
        """What PyTorch would hand to backward: the memory that was saved, or what its tensor was given instead."""
        source = None if self.source is None else self.source()
        if source is None or _torch.storage_or_none(source) == _torch.storage_or_none(self.alias):
            return self.alias
        return _torch.detached(source)

    @property
    def moved(self) -> bool:
        """Whether the version counter says that it was written."""
        return self.version != _version_of(self.alias)

    def version_error(self, node: Any) -> str:
        """What PyTorch says where it has, and ``node`` asks for the value."""
        number = self.output or 0
        maker = node if self.output is not None else getattr(self.very_tensor, "grad_fn", None)
        return _torch.version_error(self.alias, self.version, maker, number)

    @property
    def changed(self) -> bool:
        """Whether a byte of it has changed (by the counter where there is no original)."""
        if self.original is None:
            return self.moved or self.changed_part is not None
        current = self.current
        # Still the same memory: nobody has written who asked torch for it.
        if current is self.alias and not self.is_copied and _torch.same_memory(current, self.original):
            return False
        return not (self.is_emptied or have_same_bytes(current, self.original))

    @property
    def changed_part(self) -> Kept | None:
        """The first of its parts of which a byte has changed."""
        return next((part for part in self.parts if part.changed), None)

    @property
    def is_emptied(self) -> bool:
        """Whether its memory has been taken away: nothing is there to be read, or compared."""
        return not fits_its_memory(self.alias)

    @property
    def nbytes(self) -> int:
        """The bytes that the original takes, if it does not share them any more."""
        return 0 if self.original is None else self.original.numel() * self.original.element_size()

    def own_memory(self) -> tuple[int, int] | None:
        """(address, bytes) of the memory that only originals hold; None while it is that of the program, too."""
        if self.original is None or (not self.is_copied and _torch.same_memory(self.alias, self.original)):
            return None
        return _torch.memory_of(self.original)

    def change(self) -> ByteChange | None:
        """Which elements differ, and the first few of them; None where that cannot be decided."""
        current = self.current
        if self.original is None or current.shape != self.original.shape or current.dtype != self.original.dtype:
            return None
        # A device need not have every operator, nor memory to spare.
        now, before = current.cpu(), self.original.cpu()
        different = _differing(now, before)
        places = torch.nonzero(different)[:_SAMPLES]
        samples = tuple(
            (tuple(place), _shown(before[tuple(place)]), _shown(now[tuple(place)])) for place in places.tolist()
        )
        return ByteChange(int(different.sum()), different.numel(), samples)


def fits_its_memory(tensor: Any) -> bool:
    """Whether all elements of a tensor lie within its storage, as ``resize_`` of a storage does not see to."""
    if not _torch.has_elements(tensor) or not tensor.numel():
        return True
    held = tensor.untyped_storage().nbytes()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return bool(held >= (tensor.storage_offset() + last + 1) * tensor.element_size())


def _version_of(tensor: Any) -> int:
    return 0 if tensor.is_inference() else int(_version(tensor))


def have_same_bytes(one: Any, other: Any) -> bool:
    """Whether two tensors are the same in shape, dtype and every bit."""
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


def as_integers(tensor: Any) -> Any:
    """The bits of a tensor, so that a NaN equals itself."""
    tensor = tensor.resolve_conj().resolve_neg()
    if tensor.dtype == torch.complex128:
        tensor = torch.view_as_real(tensor)
    kind = _SAME_SIZE.get(tensor.element_size())
    return tensor if kind is None or tensor.dtype == torch.bool else tensor.view(kind)


def _shown(element: Any) -> str:
    value = element.item()
    return f"{value:.6g}" if isinstance(value, float) and math.isfinite(value) else str(value)
