"""Kept originals by the storage that they were saved from, and the memory they take.

An original takes memory of its own from the moment a write separates it from the program's tensor; a copy does from
the start. Originals that share such memory count once.
"""

from __future__ import annotations

import weakref

from gradsan import _torch
from gradsan._errors import HealingEndedError
from gradsan.model import Message
from gradsan.originals.originals import Kept

_PACKS_BETWEEN_LOOKS = 64
_SHARE_OF_MEMORY = 4


class _Entry(weakref.ref[Kept]):
    """Weak reference to a kept value: its storage, and the memory of its original if separate."""

    __slots__ = ("block", "storage")

    block: int | None
    storage: int


class Holdings:
    """The live kept values; ``max_bytes`` bounds the memory of their originals, None: no bound."""

    def __init__(self, max_bytes: int | None) -> None:
        """Start empty."""
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
