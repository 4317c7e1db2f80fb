"""Copies of saved values on devices: a bound by the free memory there, and their peak memory."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch

from gradsan import _torch
from gradsan.model import Copies
from gradsan.originals.originals import cloned

# Reading the free memory of a device takes some ten microseconds.
_COPIES_BETWEEN_LOOKS = 64
_SHARE_BETWEEN_LOOKS = 8


class DeviceCopies:
    """Makes the copies of a run, and tracks the live ones.

    Those on a device may take as much memory as they leave free there, as the device reports it; without a report
    there is no bound. Copies on the CPU have no bound either.
    """

    def __init__(self) -> None:
        """Start without copies."""
        self._accounts: dict[torch.device, _Account] = {}

    def copied(self, tensor: Any) -> Any:
        """Return a copy of ``tensor``, a plain tensor with elements; None where it would take too much memory."""
        device = tensor.device
        if device.type == "cpu":
            return cloned(tensor)
        account = self._accounts.get(device)
        if account is None:
            account = self._accounts.setdefault(device, _Account(device))
        nbytes = tensor.numel() * tensor.element_size()
        copy = cloned(tensor) if account.has_room(nbytes) else None
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

    def has_room(self, nbytes: int) -> bool:
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
