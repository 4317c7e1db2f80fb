"""Snapshots: copies of small memory that may be written past the version counter, to be compared with it later.

A copy of the bytes at one moment is the value at another if nothing was logged in between. Only memory of ordinary
tensors on the CPU up to ``BYTES_OF_A_COPY`` is copied, where the program reads its ``.data`` or writes it unrecorded,
and something may have been saved since the last backward; otherwise a write counts as a change.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Literal, NamedTuple

import torch

from gradsan import _torch
from gradsan.record.detector import Sweep
from gradsan.record.log import Core, RawStack

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
        if _nothing_is_saved(self._core):
            return
        if not stack.codes or stack.codes[0].co_filename.startswith(_torch.package_folder()):
            return
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
            return
        if tensor.is_inference():  # autograd does not save it
            return
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
        return _torch.bytes_of(_placed(memory, tensor))

    def _taken_at(self, tensor: torch.Tensor, clock: int, writes: Iterable[int], is_counted: bool) -> Iterator[Any]:
        at = list(writes)
        for one in self._copies.get(_torch.storage_or_none(tensor), ()):
            first, last = sorted((clock, one.clock))
            is_moved = not is_counted and one.version != tensor._version
            if not is_moved and not any(first < write <= last for write in at):
                yield one.memory

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
    with torch.no_grad():
        return bool(torch.equal(_torch.own_bytes(_placed(memory, tensor)), _torch.own_bytes(tensor)))


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
