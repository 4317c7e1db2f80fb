"""Saved tensors of a recomputation by ``checkpoint``, which keeps them for backward without a check of versions."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from gradsan import _torch
from gradsan.record.detector import Run
from gradsan.record.user_hooks import HookedSave


class Recomputed(NamedTuple):
    """A value that a recomputation keeps for backward, as it was when an operation saved it; ``kept`` in deep mode."""

    weak: Any
    clock: int
    version: int
    kept: Any


class RecomputedSaves:
    """The saved tensors of running recomputations: the function may write to one after it was saved.

    Nothing is kept alive.
    """

    def __init__(self, run: Run) -> None:
        self._known: dict[int, Recomputed] = {}

    def add(self, save: HookedSave, tensor: torch.Tensor) -> None:
        """Note a value and its save."""
        number, known = id(tensor), self._known

        def forget(gone: Any) -> None:
            if number in known and known[number].weak is gone:
                del known[number]

        weak = _torch.weak_tensor(tensor, forget)
        known[number] = Recomputed(weak, save.clock, tensor._version, save.kept)

    def of(self, tensor: Any) -> Recomputed | None:
        """Return what is known of a value; None where it is of no recomputation."""
        known = self._known.get(id(tensor))
        return known if known is not None and known.weak() is tensor else None

    def is_overwritten(self, tensor: torch.Tensor) -> bool:
        """Whether the recomputation has written to a value since it was saved."""
        known = self.of(tensor)
        return known is not None and known.version != tensor._version
