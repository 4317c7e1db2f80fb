"""Small memory as it was when ``.data`` was asked for: what is written behind it may leave every byte as it was.

A copy of the bytes at one moment is what a value was at another if nothing was logged in between. Only memory of
ordinary tensors on the CPU up to ``BYTES_OF_A_COPY`` is copied, where the program's own code asks and something may
have been saved since the last backward; else a write is taken for a change.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from gradsan.capture import _torch
from gradsan.capture.stacks import is_user_file

BYTES_OF_A_COPY = 64 * 2**10
BYTES_KEPT = 16 * 2**20
_COPIES_OF_A_STORAGE = 4


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

        ``stack`` is where ``.data`` was asked for: libraries that copy or move parameters have no part in this.
        """
        if not stack.codes or not is_user_file(stack.codes[0].co_filename):
            return
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
            return
        storage = tensor.untyped_storage()
        size, key, core = int(storage.nbytes()), int(storage._cdata), self._core
        if not 0 < size <= BYTES_OF_A_COPY or _nothing_is_saved(core):
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

    def shows_same(self, tensor: Any, clock: int, writes: Iterable[int]) -> bool:
        """Whether ``tensor`` has the bytes that it had at ``clock``; False where that is not known.

        Its version counter is what it was at ``clock``. ``writes`` are the clocks of the writes to its storage; copies
        made on the other side of one of them tell nothing.
        """
        at = list(writes)
        for one in self._copies.get(_torch.storage_or_none(tensor), ()):
            first, last = sorted((clock, one.clock))
            is_apart = one.version != tensor._version or any(first < write <= last for write in at)
            if not is_apart and _same(one.memory, tensor):
                return True
        return False

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


def _bytes(tensor: Any) -> Any:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
