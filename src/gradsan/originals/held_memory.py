"""Memory that kept originals take: a bound in heal mode, and the free memory of a device for copies there.

An original takes memory of its own from the moment a write separates it from the program's tensor; a copy does from
the start. Originals that share such memory count once.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch

from gradsan import _torch
from gradsan._errors import HealingEndedError
from gradsan.model import Copies, Message
from gradsan.originals.originals import Kept, cloned

_PACKS_BETWEEN_LOOKS = 64
_SHARE_OF_MEMORY = 4

# Reading the free memory of a device takes some ten microseconds.
_COPIES_BETWEEN_LOOKS = 64
_SHARE_BETWEEN_LOOKS = 8


class _Entry(weakref.ref[Kept]):
    """Weak reference to a kept value: its storage, and the memory of its original if separate."""

    __slots__ = ("block", "storage")

    block: int | None
    storage: int


class Holdings:
    """The live kept values; ``max_bytes`` bounds the memory of their originals, None: no bound."""

    def __init__(self, max_bytes: int | None) -> None:
        self.max_bytes = max_bytes
        self.bytes = 0
        self._live: dict[int, set[_Entry]] = {}
        self._blocks: dict[int, list[int]] = {}
        self._count = 0
        self._packs = self._packed = 0

    def add(self, kept: Kept) -> None:
        """Track a value that was just saved.

        Raises:
            HealingEndedError: if the originals take too much memory.
        """
        storage = _torch.storage_or_none(kept.alias)
        if not storage or kept.original is None:
            return
        entry = _Entry(kept, self._gone)
        entry.storage, entry.block = storage, None
        self._live.setdefault(storage, set()).add(entry)
        self._count += 1
        if self.max_bytes is None:
            return
        if kept.is_copied:
            self._measure(entry, kept)
            self._check()
        self._packs += 1
        self._packed += kept.nbytes
        # Much is written unwatched, but checking all live values at every save would take too long.
        is_much = self._packed * _SHARE_OF_MEMORY > self.max_bytes - self.bytes
        if self._packs >= max(_PACKS_BETWEEN_LOOKS, self._count // 8 if is_much else self._count):
            self.look_at_all()

    def of(self, storage: int) -> list[Kept]:
        """Return the live values that were saved from a storage, oldest first."""
        found = (entry() for entry in tuple(self._live.get(storage, ())))
        return sorted((kept for kept in found if kept is not None), key=lambda kept: kept.clock)

    def look_at(self, storage: int) -> None:
        """Update the memory count after a write to ``storage``. Raises as :meth:`add`."""
        for entry in tuple(self._live.get(storage, ())):
            kept = entry()
            if kept is not None:
                self._measure(entry, kept)
        self._check()

    def look_at_all(self) -> None:
        """Update the memory count for all live values. Raises as :meth:`add`."""
        self._packs = self._packed = 0
        for storage in tuple(self._live):
            for entry in tuple(self._live.get(storage, ())):
                kept = entry()
                if kept is not None:
                    self._measure(entry, kept)
        self._check()

    def _measure(self, entry: _Entry, kept: Kept) -> None:
        block = kept.own_memory()
        if block is not None and block[0] == entry.block:
            return
        self._let_go(entry)
        if block is not None:
            entry.block = block[0]
            known = self._blocks.setdefault(block[0], [block[1], 0])
            known[1] += 1
            if known[1] == 1:
                self.bytes += known[0]

    def _let_go(self, entry: _Entry) -> None:
        if entry.block is None:
            return
        known = self._blocks[entry.block]
        known[1] -= 1
        if not known[1]:
            del self._blocks[entry.block]
            self.bytes -= known[0]
        entry.block = None

    def _gone(self, entry: weakref.ref[Kept]) -> None:
        assert isinstance(entry, _Entry)
        self._let_go(entry)
        self._count -= 1
        others = self._live.get(entry.storage)
        if others is not None:
            others.discard(entry)
            if not others:
                del self._live[entry.storage]

    def _check(self) -> None:
        if self.max_bytes is not None and self.bytes > self.max_bytes:
            raise HealingEndedError(Message("error.healing_ended", {"used": self.bytes, "bound": self.max_bytes}))


class DeviceCopies:
    """Makes the copies of a run, and tracks the live ones.

    Those on a device may take as much memory as they leave free there, as the device reports it; without a report
    there is no bound. Copies on the CPU have no bound either.
    """

    def __init__(self) -> None:
        self._accounts: dict[torch.device, _Account] = {}

    def copied(self, tensor: torch.Tensor) -> Any:
        """Return a copy of ``tensor``, a plain tensor with elements; None where it would take too much memory."""
        device = tensor.device
        if device.type == "cpu":
            return cloned(tensor)
        account = self._accounts.get(device)
        if account is None:
            account = self._accounts.setdefault(device, _Account(device))
        nbytes = tensor.numel() * tensor.element_size()
        copy = cloned(tensor) if account.can_take(nbytes) else None
        if copy is None:
            account.left_out += 1
        else:
            account.add(copy, nbytes)
        return copy

    def most(self) -> tuple[Copies, ...]:
        """Return the peak memory of copies on each device, and how many values were not copied."""
        return tuple(Copies(str(one.device), one.most, one.left_out) for one in self._accounts.values())


class _Account:
    """The live copies on one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.left_out = self.most = 0
        self._bytes = self._bytes_at_look = self._until_look = 0
        self._bound: int | None = None
        self._live: dict[int, weakref.ref[Any]] = {}
        # Copies also die in the engine's threads, and in the garbage collector, which may run while the lock is held.
        self._lock = threading.RLock()

    def can_take(self, nbytes: int) -> bool:
        """Whether a copy of ``nbytes`` leaves as much free as all copies take."""
        after = self._bytes + nbytes
        is_much = self._bound is not None and after - self._bytes_at_look > self._bound // _SHARE_BETWEEN_LOOKS
        if is_much or self._until_look <= 0:
            free = _torch.free_memory(self.device)
            self._bound = None if free is None else (self._bytes + free) // 2
            self._bytes_at_look, self._until_look = self._bytes, _COPIES_BETWEEN_LOOKS
        self._until_look -= 1
        return self._bound is None or after <= self._bound

    def add(self, copy: Any, nbytes: int) -> None:
        """Count a copy as long as it lives."""

        def gone(_: Any, key: int = id(copy)) -> None:
            with self._lock:
                self._bytes -= nbytes
                del self._live[key]

        with self._lock:
            self._bytes += nbytes
            self.most = max(self.most, self._bytes)
            self._live[id(copy)] = weakref.ref(copy, gone)
