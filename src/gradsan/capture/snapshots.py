"""Small memory as it was when ``.data`` was asked for: what is written behind it may leave every byte as it was.

A copy of the bytes at one moment is what a value was at another if nothing was logged in between. Only memory of
ordinary tensors on the CPU up to ``BYTES_OF_A_COPY`` is copied, where the program or a library asks and something may
have been saved since the last backward; else a write is taken for a change.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

import torch

from gradsan.capture import _torch

BYTES_OF_A_COPY = 4 * 2**20
BYTES_KEPT = 64 * 2**20
_COPIES_OF_A_STORAGE = 4
_ROUNDINGS = 8


class Snapshot(NamedTuple):
    """The bytes of a whole storage, the clock, how many writes had been logged by then, and the version counter."""

    clock: int
    write_count: int
    version: int
    memory: Any


class Snapshots:
    """Copies by storage; those of a storage that died are let go."""

    def __init__(self, core: Any) -> None:
        """Start with none; ``core`` keeps clock and log."""
        self._core = core
        self._copies: dict[int, list[Snapshot]] = {}
        self._alive: dict[int, Any] = {}
        self._bytes = 0

    def take(self, tensor: Any, stack: Any) -> None:
        """Copy the memory of ``tensor``, if it is small and may have been written since the last time.

        ``stack`` is where ``.data`` was asked for: what torch copies or moves itself has no part in this.
        """
        if not stack.codes or stack.codes[0].co_filename.startswith(_torch.package_folder()):
            return
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
            return
        if not _nothing_is_saved(self._core):
            self._copy(tensor)

    def before_write(self, target: Any) -> None:
        """Copy what is about to be written where autograd does not record it, if it is small and has a graph."""
        if torch.is_grad_enabled():
            return
        for tensor in target if isinstance(target, (tuple, list)) else (target,):
            is_plain = _torch.is_tensor(tensor) and _torch.has_elements(tensor) and tensor.is_cpu
            if is_plain and tensor.grad_fn is not None and not tensor.is_conj() and not tensor.is_neg():
                self._copy(tensor)

    def _copy(self, tensor: Any) -> None:
        storage = tensor.untyped_storage()
        size, key, core = int(storage.nbytes()), int(storage._cdata), self._core
        if not 0 < size <= BYTES_OF_A_COPY:
            return
        known = self._copies.get(key)
        if known and known[-1].write_count == core.write_count:
            return
        if self._bytes + size > BYTES_KEPT:
            self.forget_dead()
            if self._bytes + size > BYTES_KEPT:
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
        self, tensor: Any, clock: int, writes: Iterable[int], *, is_counted: bool = False
    ) -> Literal["same", "near", "different"] | None:
        """How the values of ``tensor`` stand to those at ``clock``: same bytes, the same but for rounding, or others.

        None where that is not known. Its version counter is what it was at ``clock``, but where
        ``is_counted``. ``writes`` are the clocks of the writes to its storage; copies made on the other side of one of
        them tell nothing.
        """
        at, known = list(writes), False
        for one in self._copies.get(_torch.storage_or_none(tensor), ()):
            first, last = sorted((clock, one.clock))
            is_moved = not is_counted and one.version != tensor._version
            if is_moved or any(first < write <= last for write in at):
                continue
            known = True
            if _same(one.memory, tensor):
                return "same"
            if _is_near(one.memory, tensor):
                return "near"
        return "different" if known else None

    def forget(self) -> None:
        """Begin anew: between two stretches of watching nothing is logged."""
        self._copies.clear()
        self._alive.clear()
        self._bytes = 0

    def forget_dead(self) -> None:
        """Let go of the copies of storages that died."""
        for key in [key for key, weak in self._alive.items() if weak.expired()]:
            del self._alive[key]
            self._bytes -= sum(map(_size, self._copies.pop(key)))


def _nothing_is_saved(core: Any) -> bool:
    """Whether no Node was made yet, or none since the last backward: parameters are initialised, or updated by hand."""
    return not core.saves or bool(core.backward_end == _torch.sequence_number() != 0)


def _size(snapshot: Snapshot) -> int:
    return int(snapshot.memory.numel() * snapshot.memory.element_size())


def _same(memory: Any, tensor: Any) -> bool:
    if tensor.is_conj() or tensor.is_neg():
        return False
    with torch.no_grad():
        before = memory.view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        return bool(torch.equal(_bytes(before), _bytes(tensor.detach())))


def _is_near(memory: Any, tensor: Any) -> bool:
    """Whether only rounding tells two tensors apart: zeros are the same, signs and all."""
    if not tensor.is_floating_point() or tensor.is_neg():
        return False
    with torch.no_grad():
        now = tensor.detach().to(torch.float64)
        before = memory.view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        before = before.to(torch.float64)
        zeros = (before == 0) | (now == 0)
        if bool((zeros & ((before != now) | (before.signbit() != now.signbit()))).any()):
            return False
        gap = torch.linalg.vector_norm(now - before)
        return bool(gap <= _ROUNDINGS * torch.finfo(tensor.dtype).eps * torch.linalg.vector_norm(now))


def _bytes(tensor: Any) -> Any:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
