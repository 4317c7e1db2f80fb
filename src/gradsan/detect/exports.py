"""Exported memory, handed out of PyTorch or aliased by ``.data``, compared byte by byte before a backward.

The holder of a NumPy array, a DLPack capsule or a pointer writes without a trace. While a storage is exported, the
values that new Nodes save in it are copied; where it is exported after a save, the storage is copied at that time.

A copy of the bytes at one moment is the value at another if nothing was logged in between. Only memory of
ordinary tensors on the CPU up to ``BYTES_OF_A_COPY`` is copied, where the program or a library exports it and something
may have been saved since the last backward; otherwise a write counts as a change.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, NamedTuple

import torch
import torch.utils.dlpack

from gradsan import _torch
from gradsan.model import Message
from gradsan.record._writer_pure import is_called_from
from gradsan.record.detector import Detector, Run, Sweep
from gradsan.record.log import Core, RawStack
from gradsan.record.patches import Patches, standing

BYTES_KEPT = 256 * 2**20
BYTES_OF_A_NOTE = 16 * 2**20


class Export(NamedTuple):
    """An export of memory: its site, clock, and the bytes at that moment (None: too large, or nothing to compare)."""

    op: str
    clock: int
    stack: RawStack
    weak: Any
    snapshot: Any


class Exports(Detector):
    """The live exported storages, and copies of the values saved in them."""

    part = "bypasses"

    def __init__(self, run: Run) -> None:
        self._core, self._note, self._listeners = run.core, run.guard.note, run.listeners
        self.on_export: Callable[[], None] = lambda: None
        """Called when memory is handed out while none was before."""
        self.on_hand_out: Callable[[int], None] | None = None
        """Called with a storage that is handed out while a backward runs."""
        self.on_taken: Callable[[Any], None] = lambda tensor: None
        """Called with a tensor whose memory the program asks for."""
        self.on_lent: Callable[[Any, Any, Any], None] = lambda array, tensor, stack: None
        """Called with foreign memory that torch was given, the tensor made of it, and the stack."""
        self._exports: dict[int, Export] = {}
        self._saved: OrderedDict[tuple[int, int, str], tuple[int, Any]] = OrderedDict()
        self._bytes, self._sweep = 0, Sweep()

    @property
    def any(self) -> bool:
        """Whether exported memory is alive."""
        return bool(self._exports)

    def hand_out(self, tensor: torch.Tensor, op: str, stack: RawStack, fresh: bool = False) -> None:
        """Note that ``tensor``'s memory is accessible to others; ``fresh``: nothing can have saved it before.

        Memory of a device is not copied and compared: reading the result would synchronise.
        """
        if not torch.is_tensor(tensor) or not _torch.storage_or_none(tensor) or tensor.device.type != "cpu":
            return
        storage = tensor.untyped_storage()
        key = int(storage._cdata)
        if key in self._exports and not self._exports[key].weak.expired():
            return
        self.forget_dead()
        snapshot, size = None, int(storage.nbytes())
        if not fresh and self._fits(size):
            snapshot = storage.clone()
            self._bytes += size
        core = self._core
        weak = _torch.weak_storage(storage)
        self._exports[key] = Export(op, core.tick(), stack, weak, snapshot)
        self.on_export()
        self._listeners.call_after_nodes(self.after_nodes)
        if core.running and self.on_hand_out is not None:
            self.on_hand_out(key)

    def after_nodes(self, holder: Any, first: int, end: int) -> None:
        """Copy the values that the Nodes numbered ``first <= n < end`` saved in exported memory."""
        if not self._exports:
            return
        thread = threading.get_ident()
        holders = holder if isinstance(holder, (tuple, list)) else (holder,)
        # Attributes of a tensor whose class dispatches, such as a compiler's, call an operator.
        tensors = [one for one in holders if torch.is_tensor(one) and not _torch.dispatches(type(one))]
        waiting = [one.grad_fn for one in tensors if one.grad_fn is not None]
        seen = set()
        while waiting:
            node = waiting.pop()
            number = _torch.node_sequence(node)
            if number is None or number < first or node in seen:
                continue
            seen.add(node)
            waiting += [child for child, _ in node.next_functions if child is not None]
            for slot, saved in _torch.saved_slots(node):
                tensor = _torch.packed_object(saved)
                if not torch.is_tensor(tensor) or not _torch.has_elements(tensor):
                    continue
                if _torch.storage_or_none(tensor) not in self._exports:
                    continue
                size = tensor.numel() * tensor.element_size()
                if self._fits(size):
                    self._saved[thread, number, slot] = (_torch.storage_or_none(tensor), _bytes(tensor))
                    self._bytes += size

    def changed(
        self, storage: int, number: int, thread: int, slot: str, tensor: torch.Tensor, made: Any
    ) -> Export | None:
        """Return the export through which the bytes of a saved value have changed; None where they are unchanged."""
        before = self.before(storage, number, thread, slot, tensor, made)
        return None if before is None or torch.equal(before, _bytes(tensor)) else self._exports[storage]

    def before(self, storage: int, number: int, thread: int, slot: str, tensor: torch.Tensor, made: Any) -> Any:
        """The bytes of a saved value at the save; None where its memory was not exported, or they are unknown."""
        export = self._exports.get(storage)
        if export is None or export.weak.expired():
            return None
        copied = self._saved.get((thread, number, slot))
        if copied is not None and copied[0] == storage:
            return copied[1]
        if export.snapshot is not None and made is not None and made.clock < export.clock:
            whole = torch.empty(0, dtype=tensor.dtype).set_(export.snapshot)
            return _bytes(whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()))
        return None

    def of(self, storage: int) -> Export | None:
        """Return the export of a storage; None where there is none."""
        export = self._exports.get(storage)
        return None if export is None or export.weak.expired() else export

    def copy_of(self, tensor: torch.Tensor) -> Any:
        """Return the bytes of a tensor in exported memory; None where it is not exported, or too large."""
        export = self._exports.get(_torch.storage_or_none(tensor)) if self._exports else None
        if export is None or export.weak.expired():
            return None
        size = tensor.numel() * tensor.element_size()
        if size > BYTES_OF_A_NOTE:
            self._note(Message("blind.export_too_large", {"bytes": size}))
            return None
        return _bytes(tensor)

    def changed_since(self, tensor: torch.Tensor, clock: int, copy: Any, storage: int = 0) -> Export | None:
        """Return the export through which the bytes of a tensor have changed since ``clock``, when they were ``copy``.

        Where memory was exported later, ``copy`` is None, and the bytes are those of that moment. ``storage`` is the
        exported one, where ``tensor`` has the memory by another (an array that was converted back).
        """
        export = self._exports.get(storage or _torch.storage_or_none(tensor)) if self._exports else None
        if export is None or export.weak.expired():
            return None
        before = copy
        if before is None and export.snapshot is not None and export.clock > clock:
            whole = torch.empty(0, dtype=tensor.dtype).set_(export.snapshot)
            before = _bytes(whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()))
        if before is None or (storage and before.numel() != tensor.numel() * tensor.element_size()):
            return None
        return None if torch.equal(before, _bytes(tensor)) else export

    def install(self, patches: Patches, guard: Callable[[Callable[[], object]], None]) -> None:
        """Watch the functions by which memory leaves and enters torch, until ``patches`` is undone."""
        for name in ("numpy", "__array__", "__dlpack__", "data_ptr", "share_memory_"):
            self._watch(patches, guard, torch.Tensor, name, given=True)
        for owner in (torch, torch.utils.dlpack):
            self._watch(patches, guard, owner, "to_dlpack", given=True)
        for name in ("from_numpy", "frombuffer", "as_tensor", "asarray"):
            self._watch(patches, guard, torch, name, given=False)

    def _watch(self, patches: Patches, guard: Any, owner: Any, name: str, *, given: bool) -> None:
        original, core, folder = standing(owner, name), self._core, _torch.package_folder()
        if original is None:
            return

        def before(args: tuple[Any, ...], _: dict[str, Any]) -> None:
            inner = name == "data_ptr" and is_called_from(folder, 1)
            if args and not inner and not _torch.is_compiling():
                stack = core.stack(1)
                guard(lambda: self.hand_out(args[0], name, stack))
                guard(lambda: self.on_taken(args[0]))

        def after(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
            is_shared = bool(args) and not torch.is_tensor(args[0]) and _shares(args[0])
            if is_shared or (args and name == "frombuffer"):
                stack = core.stack(1)
                if is_shared:
                    guard(lambda: self.on_lent(args[0], result, stack))
                guard(lambda: self.hand_out(result, name, stack, fresh=True))

        listener = core.listener(original, before, None) if given else core.listener(original, None, after)
        patches.set(owner, name, listener)

    def _fits(self, size: int) -> bool:
        while self._saved and self._bytes + size > BYTES_KEPT:
            _, (_, copy) = self._saved.popitem(last=False)
            self._bytes -= copy.numel()
        if self._bytes + size > BYTES_KEPT:
            self._note(Message("blind.export_too_large", {"bytes": size}))
            return False
        return True

    def forget_dead(self) -> None:
        """Forget storages that died, and copies of their values."""
        if not self._sweep.is_due(len(self._exports) + len(self._saved)):
            return
        for key in [key for key, one in self._exports.items() if one.weak.expired()]:
            snapshot = self._exports.pop(key).snapshot
            self._bytes -= 0 if snapshot is None else snapshot.nbytes()
        for place in [place for place, (storage, _) in self._saved.items() if storage not in self._exports]:
            self._bytes -= self._saved.pop(place)[1].numel()
        if not self._exports:
            self._listeners.call_after_nodes(self.after_nodes, False)


def _shares(source: Any) -> bool:
    return hasattr(source, "__array_interface__") or isinstance(source, (bytearray, memoryview))


def _bytes(tensor: torch.Tensor) -> Any:
    with torch.no_grad():
        return tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


BYTES_OF_A_COPY = 4 * 2**20
SNAPSHOT_BYTES = 64 * 2**20
_COPIES_OF_A_STORAGE = 4
_ROUNDINGS = 8


class Snapshot(NamedTuple):
    """The bytes of a whole storage, the clock, the number of writes logged by then, and the version counter."""

    clock: int
    write_count: int
    version: int
    memory: Any


class Snapshots:
    """Snapshots by storage; those of a dead storage are dropped."""

    def __init__(self, core: Core) -> None:
        """Start empty; ``core`` has the clock and the log."""
        self._core = core
        self._copies: dict[int, list[Snapshot]] = {}
        self._alive: dict[int, Any] = {}
        self._bytes, self._sweep = 0, Sweep()

    def take(self, tensor: torch.Tensor, stack: RawStack) -> None:
        """Copy the memory of ``tensor``, if it is small and may have been written since the last time.

        ``stack`` is where ``.data`` was read: torch's own copies and moves are left out.
        """
        if not stack.codes or stack.codes[0].co_filename.startswith(_torch.package_folder()):
            return
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
            return
        if tensor.is_inference():  # autograd does not save it
            return
        if not _nothing_is_saved(self._core):
            self._copy(tensor)

    def before_write(self, target: Any) -> None:
        """Copy a small value that is about to be written unrecorded by autograd, and has or may have a graph."""
        is_recorded = torch.is_grad_enabled()
        for tensor in target if isinstance(target, (tuple, list)) else (target,):
            if not _torch.has_elements(tensor) or not tensor.is_cpu or tensor.is_conj() or tensor.is_neg():
                continue
            if is_recorded:
                # The memory of ``x.detach()`` is that of x.
                is_alias = not tensor.requires_grad and _torch.shares_memory(tensor)
                is_wanted = is_alias and not _nothing_is_saved(self._core) and not self._is_copied_often(tensor)
            else:
                # PyTorch renews a view's own grad_fn when it is asked for, and then allows writes that it would refuse.
                is_wanted = (tensor if tensor._base is None else tensor._base).grad_fn is not None
            if is_wanted:
                self._copy(tensor)

    def _is_copied_often(self, tensor: torch.Tensor) -> bool:
        """Whether so many copies of its memory are kept that it is rather a buffer, written row by row."""
        return len(self._copies.get(int(tensor.untyped_storage()._cdata), ())) >= _COPIES_OF_A_STORAGE

    def _copy(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        size, key, core = int(storage.nbytes()), int(storage._cdata), self._core
        if not 0 < size <= BYTES_OF_A_COPY:
            return
        known = self._copies.get(key)
        if known and known[-1].write_count == core.write_count:
            return
        if self._bytes + size > SNAPSHOT_BYTES:
            self.forget_dead()
            if self._bytes + size > SNAPSHOT_BYTES:
                return
        if known is None:
            known = self._copies[key] = []
            self._alive[key] = _torch.weak_storage(storage)
        with torch.no_grad():
            whole = tensor.detach().as_strided((size // tensor.element_size(),), (1,), 0)
            known.append(Snapshot(core.clock, core.write_count, int(tensor._version), whole.clone()))
        self._bytes += size
        while len(known) > _COPIES_OF_A_STORAGE:
            self._bytes -= _size(known.pop(0))

    def compared(
        self, tensor: torch.Tensor, clock: int, writes: Iterable[int], *, is_counted: bool = False
    ) -> Literal["same", "near", "different"] | None:
        """Compare the values of ``tensor`` with those at ``clock``: same bytes, the same up to rounding, or others.

        None where that is unknown. Its version counter is that at ``clock``, except where
        ``is_counted``. ``writes`` are the clocks of the writes to its storage; a copy with one of them in between
        is no evidence.
        """
        known = False
        for memory in self._taken_at(tensor, clock, writes, is_counted):
            known = True
            if _same(memory, tensor):
                return "same"
            if _is_near(memory, tensor):
                return "near"
        return "different" if known else None

    def changed(self, tensor: torch.Tensor, clock: int, writes: Iterable[int]) -> Any:
        """Mark the elements that differ from those at ``clock``, as :meth:`compared` takes it; None if unknown."""
        memory = next(self._taken_at(tensor, clock, writes, True), None)
        if memory is None or tensor.is_conj() or tensor.is_neg():
            return None
        with torch.no_grad():
            before, now = _placed(memory, tensor), tensor.detach()
            return (before != now) & ~((before != before) & (now != now))

    def before(self, tensor: torch.Tensor, clock: int, writes: Iterable[int]) -> Any:
        """Return the bytes that ``tensor`` had at ``clock``, by the arguments of :meth:`compared`; None if unknown."""
        memory = next(self._taken_at(tensor, clock, writes, False), None)
        if memory is None:
            return None
        return _bytes(_placed(memory, tensor))

    def _taken_at(self, tensor: torch.Tensor, clock: int, writes: Iterable[int], is_counted: bool) -> Iterator[Any]:
        at = list(writes)
        for one in self._copies.get(_torch.storage_or_none(tensor), ()):
            first, last = sorted((clock, one.clock))
            is_moved = not is_counted and one.version != tensor._version
            if not is_moved and not any(first < write <= last for write in at):
                yield one.memory

    def forget(self) -> None:
        """Begin anew: between two stretches of watching nothing is logged."""
        self._copies.clear()
        self._alive.clear()
        self._bytes = 0

    def forget_dead(self) -> None:
        """Drop the snapshots of storages that died."""
        if not self._sweep.is_due(len(self._alive)):
            return
        for key in [key for key, weak in self._alive.items() if weak.expired()]:
            del self._alive[key]
            self._bytes -= sum(map(_size, self._copies.pop(key)))


def _nothing_is_saved(core: Core) -> bool:
    """Whether no Node was made since the last backward, or at all: parameters are initialised, or updated by hand."""
    return not core.saves or bool(core.backward_end == _torch.sequence_number() != 0)


def _size(snapshot: Snapshot) -> int:
    return int(snapshot.memory.numel() * snapshot.memory.element_size())


def _placed(memory: Any, tensor: torch.Tensor) -> Any:
    """The elements of a copied memory that are at the places of ``tensor``."""
    return memory.view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _same(memory: Any, tensor: torch.Tensor) -> bool:
    if tensor.is_conj() or tensor.is_neg():
        return False
    with torch.no_grad():
        before = _placed(memory, tensor)
        return bool(torch.equal(_snapshot_bytes(before), _snapshot_bytes(tensor.detach())))


def _is_near(memory: Any, tensor: torch.Tensor) -> bool:
    """Whether two tensors differ only by rounding; zeros must be equal, signs included."""
    if not tensor.is_floating_point() or tensor.is_neg():
        return False
    with torch.no_grad():
        now = tensor.detach().to(torch.float64)
        before = _placed(memory, tensor)
        before = before.to(torch.float64)
        zeros = (before == 0) | (now == 0)
        if bool((zeros & ((before != now) | (before.signbit() != now.signbit()))).any()):
            return False
        gap = torch.linalg.vector_norm(now - before)
        return bool(gap <= _ROUNDINGS * torch.finfo(tensor.dtype).eps * torch.linalg.vector_norm(now))


def _snapshot_bytes(tensor: torch.Tensor) -> Any:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
