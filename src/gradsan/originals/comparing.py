"""Comparison of saved values with their originals, those on one device with one wait, and of gradients."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable
from typing import Any

import torch

from gradsan import _torch
from gradsan.originals.originals import Kept, KnownOutside, as_integers
from gradsan.record.ledger import RawWrite
from gradsan.record.log import Log

_STORAGE = RawWrite._fields.index("storage")
_ROUNDINGS = 8

# A walk of the graph takes some ten times as long for a value as a look at it does.
_LIVE_FOR_ONE_REACHED = 8
_REACHED_AT_LEAST = 64
_COMPARED_UNREACHED = 256
_BACKWARDS_BETWEEN_WALKS = 32
_LIVE_FOR_ONE_BACKWARD = 1024
_DEAD_BETWEEN_LOOKS = 10_000


class LiveValues:
    """The kept values that live, of all graphs: where none of them has changed, no graph need be walked."""

    def __init__(self) -> None:
        """Start with none."""
        self._live: list[weakref.ref[Kept]] = []
        self._most = _DEAD_BETWEEN_LOOKS
        self._reached = self._until_walk = self._until_look = 0

    def add(self, kept: Kept) -> None:
        """Follow a value that was just saved."""
        self._live.append(weakref.ref(kept))
        if len(self._live) > self._most:
            self._look()

    def walked(self, reached: int) -> None:
        """A graph with so many values has been walked."""
        self._reached, self._until_walk = reached, _BACKWARDS_BETWEEN_WALKS

    def doubtful(self) -> list[Kept] | None:
        """Those that may have changed; None where a walk of one graph is less work than to compare them."""
        self._until_walk -= 1
        self._until_look -= 1
        live = self._few()
        if live is None or self._until_walk < 0:
            return None
        doubtful = [kept for kept in live if not kept.is_as_saved]
        return doubtful if len(doubtful) <= _COMPARED_UNREACHED else None

    def may_lie_in(self, storages: Collection[int]) -> bool:
        """Whether any value that lives lies in one of these; True where a walk of one graph is less work."""
        if not storages:
            return False
        live = self._few()
        return live is None or any(_torch.storage_or_none(kept.alias) in storages for kept in live)

    def _few(self) -> list[Kept] | None:
        if self._until_look > 0:
            return None
        live = self._look()
        if len(live) <= _LIVE_FOR_ONE_REACHED * max(self._reached, _REACHED_AT_LEAST):
            return live
        self._until_look = len(live) // _LIVE_FOR_ONE_BACKWARD
        return None

    def _look(self) -> list[Kept]:
        # Other threads add meanwhile, and what dies in a collection adds nothing.
        seen, self._live = self._live, []
        live = [kept for one in seen if (kept := one()) is not None]
        self._live += [one for one in seen if one() is not None]
        self._most = 2 * len(live) + _DEAD_BETWEEN_LOOKS
        return live


class Comparing:
    """Says which kept values have changed; on the CPU, where a look costs little, each time that it is asked."""

    def __init__(self, core: Log, known_outside: KnownOutside) -> None:
        """``known_outside`` knows the memory that is written by who does not ask torch."""
        self._core, self._known_outside = core, known_outside

    def changed_among(self, values: Iterable[Kept]) -> list[Kept]:
        """Those of which a byte has changed."""
        changed: list[Kept] = []
        on_devices: dict[torch.device, list[Kept]] = {}
        for kept in values:
            if self._can_wait(kept):
                on_devices.setdefault(kept.alias.device, []).append(kept)
            elif kept.changed:
                changed.append(kept)
        for together in on_devices.values():
            now = self._core.clock
            for kept, differs in zip(together, _differing(together), strict=True):
                kept.same_at = -1 if differs else now
                if differs:
                    changed.append(kept)
        return changed

    def are_as_saved(self, live: LiveValues) -> bool:
        """Whether it is known that none of the values that live has been written."""
        doubtful = live.doubtful()
        return doubtful is not None and not any(one.moved for one in doubtful) and not self.changed_among(doubtful)

    def has_changed(self, kept: Kept) -> bool:
        """Whether a byte of it has changed; no second look where nobody has written since the last one."""
        if kept.same_at < 0 or kept.moved or not self._can_wait(kept):
            return kept.changed
        storage = _torch.storage_or_none(kept.alias)
        return any(entry[_STORAGE] == storage for entry in self._core.writes_after(kept.same_at)) and kept.changed

    def _can_wait(self, kept: Kept) -> bool:
        """Whether a value lies on a device, unchanged in shape and dtype, and only torch knows its memory."""
        if kept.original is None or kept.alias.is_cpu or kept.is_emptied:
            return False
        current = kept.current
        if current is not kept.alias or current.shape != kept.original.shape or current.dtype != kept.original.dtype:
            return False
        return not self._known_outside.holds(_torch.storage_or_none(current))


def _differing(values: list[Kept]) -> list[bool]:
    try:
        flags = [(as_integers(kept.alias) != as_integers(kept.original)).any() for kept in values]
        return [bool(one) for one in torch.stack(flags).cpu().tolist()]
    except RuntimeError:
        # The device lacks an operator, or memory to spare.
        return [kept.changed for kept in values]


def relative_error(right: Any, wrong: Any) -> float:
    """How far ``wrong`` is from ``right``; elements that are NaN in both, or infinite, are the same."""
    same = (wrong == right) | (wrong.isnan() & right.isnan())
    gap, size = _norm((wrong - right).masked_fill(same, 0)), _norm(right)
    return gap / size if size else (float("inf") if gap else 0.0)


def is_rounding(error: float, right: Any) -> bool:
    """Whether only rounding tells a gradient from the right one: then it is the same."""
    return bool(error <= _ROUNDINGS * torch.finfo(right.dtype).eps)


def is_same(right: Any, wrong: Any) -> bool:
    """Whether two gradients are the same but for rounding."""
    return torch.is_tensor(wrong) and is_rounding(relative_error(right, wrong), right)


def _norm(tensor: Any) -> float:
    parts = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return float(torch.linalg.vector_norm(parts.to(torch.float64)))
