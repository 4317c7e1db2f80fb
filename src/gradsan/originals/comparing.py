"""Comparison of saved values with their originals, with one synchronisation for all on a device, and of gradients."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, Protocol, cast

import torch
from torch.autograd.graph import Node

from gradsan import _torch
from gradsan.model import Deviation
from gradsan.originals.originals import Kept, KnownOutside, as_integers
from gradsan.record.log import Core, Log, has_native_core, logged_writes
from gradsan.record.user_hooks import HookedSave

_ROUNDINGS = 8

# Walking the graph takes some ten times as long per value as checking the value does.
_LIVE_FOR_ONE_REACHED = 8
_REACHED_AT_LEAST = 64
_COMPARED_UNREACHED = 256
_BACKWARDS_BETWEEN_WALKS = 32
_LIVE_FOR_ONE_COUNT = 1024
_DEAD_BETWEEN_LOOKS = 10_000


class SavedValues(Protocol):
    """The live kept values, and the hooks that pack and unpack them."""

    pack: Callable[[Any], Any]
    unpack: Callable[[Any], Any]
    is_off: bool
    """Whether the Python hooks are called for every value."""
    on_kept: Callable[[Kept], None] | None
    """Called with each value that was kept without calling the Python hook."""

    @property
    def count(self) -> int:
        """The number of live values, or slightly more."""

    def add(self, kept: Kept, /) -> None:
        """Track a value that was just saved."""

    def live(self) -> list[Kept]:
        """Return the live values, oldest first."""

    def doubtful(self) -> list[Kept]:
        """Return the live values whose bytes must be compared to know whether they have changed."""


class _PureValues:
    """The live kept values, all of them kept by the Python hooks."""

    is_off = True
    on_kept: Callable[[Kept], None] | None = None

    def __init__(self, pack: Callable[[Any], Any], unpack: Callable[[Any], Any]) -> None:
        self.pack, self.unpack = pack, unpack
        self._live: list[weakref.ref[Kept]] = []
        self._most, self._until_look = _DEAD_BETWEEN_LOOKS, 0

    @property
    def count(self) -> int:
        self._until_look -= 1
        if self._until_look < 0:
            self._until_look = len(self.live()) // _LIVE_FOR_ONE_COUNT
        return len(self._live)

    def add(self, kept: Kept, /) -> None:
        self._live.append(weakref.ref(kept))
        if len(self._live) > self._most:
            self.live()

    def live(self) -> list[Kept]:
        # Other threads add meanwhile, and the death of a value during a collection adds nothing.
        seen, self._live = self._live, []
        live = [kept for one in seen if (kept := one()) is not None]
        self._live += [one for one in seen if one() is not None]
        self._most = 2 * len(live) + _DEAD_BETWEEN_LOOKS
        return live

    def doubtful(self) -> list[Kept]:
        return [kept for kept in self.live() if not kept.is_as_saved]


def saved_values(
    core: Core,
    pack: Callable[[Any], Any],
    unpack: Callable[[Any], Any],
    exempt: tuple[Collection[int], ...],
    readers: tuple[Collection[int], ...],
) -> SavedValues:
    """An empty collection. ``pack`` and ``unpack`` are the Python hooks, called for values that are not ordinary.

    They are called for values in storages that are among ``exempt``, and for unpacking while any of ``readers`` is
    not empty.
    """
    if core.is_native and has_native_core():
        from gradsan.record import _native

        return _native.SavedValues(core, Kept, pack, unpack, exempt, readers)
    return _PureValues(pack, unpack)


class LiveValues:
    """Live kept values of all graphs: where none of them has changed, no graph need be walked."""

    def __init__(self, values: SavedValues) -> None:
        """Read the live values from ``values``."""
        self._values = values
        self._walks = {False: (0, 0), True: (0, 0)}
        """Of whole graphs and of parts: how many values the last walk reached, and the backwards until the next."""

    def walked(self, reached: int, is_part: bool) -> None:
        """Note that a graph, or the part of one that leads to the inputs of a call, with so many values was walked."""
        self._walks[is_part] = reached, _BACKWARDS_BETWEEN_WALKS

    def doubtful(self, is_part: bool) -> list[Kept] | None:
        """Return the values that may have changed; None where a walk of one graph is less work than comparing them."""
        reached, until_walk = self._walks[is_part]
        self._walks[is_part] = reached, until_walk - 1
        if until_walk <= 0 or not self._are_few(is_part):
            return None
        doubtful = self._values.doubtful()
        return doubtful if len(doubtful) <= _COMPARED_UNREACHED else None

    def may_lie_in(self, storages: Collection[int], is_part: bool) -> bool:
        """Whether any live value lies in one of these; True where a walk of one graph is less work."""
        if not storages:
            return False
        if not self._are_few(is_part):
            return True
        return any(_torch.storage_or_none(kept.alias) in storages for kept in self._values.live())

    def _are_few(self, is_part: bool) -> bool:
        return self._values.count <= _LIVE_FOR_ONE_REACHED * max(self._walks[is_part][0], _REACHED_AT_LEAST)


class Comparing:
    """Finds kept values that have changed; on the CPU, where that is cheap, by comparing at every call."""

    def __init__(self, core: Log, known_outside: KnownOutside) -> None:
        """Use ``known_outside``, which has the memory that is written without torch's knowledge."""
        self._core, self._known_outside = core, known_outside

    def changed_among(self, values: Iterable[Kept]) -> list[Kept]:
        """Return the values of which a byte has changed."""
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

    def are_as_saved(self, live: LiveValues, is_part: bool) -> bool:
        """Whether it is certain that no live value has been written."""
        doubtful = live.doubtful(is_part)
        return doubtful is not None and not any(one.moved for one in doubtful) and not self.changed_among(doubtful)

    def has_changed(self, kept: Kept) -> bool:
        """Whether a byte of it has changed; not compared again without a write since the last comparison."""
        if kept.same_at < 0 or kept.moved or not self._can_wait(kept):
            return kept.changed
        storage = _torch.storage_or_none(kept.alias)
        return any(raw.storage == storage for raw in logged_writes(self._core, kept.same_at)) and kept.changed

    def _can_wait(self, kept: Kept) -> bool:
        """Whether a value lies on a device, unchanged in shape and dtype, in memory known to torch only."""
        if kept.original is None or kept.alias.is_cpu or kept.is_emptied:
            return False
        current = kept.current
        if current is not kept.alias or current.shape != kept.original.shape or current.dtype != kept.original.dtype:
            return False
        return not self._known_outside.holds(_torch.storage_or_none(current))


def _differing(values: list[Kept]) -> list[bool]:
    try:
        flags = [(as_integers(kept.alias) != as_integers(cast("torch.Tensor", kept.original))).any() for kept in values]
        return [bool(one) for one in torch.stack(flags).cpu().tolist()]
    except RuntimeError:
        # The device lacks an operator, or free memory.
        return [kept.changed for kept in values]


WORTH_MOST = 3


def rank_of_found(raises: bool, changed: bool, deviation: Deviation | None) -> int:
    """A rank for a conflict's evidence; a value that several backwards ask for is reported again at a higher one."""
    if raises:
        return WORTH_MOST
    return 1 if not changed or (deviation is not None and not deviation.errors) else 2


def kept_in(nodes: list[Node]) -> Iterator[tuple[Any, str, Kept]]:
    """Yield (Node, slot, kept value) of the saved tensors of some Nodes."""
    for node in nodes:
        for slot, saved in _torch.saved_slots(node):
            packed = _torch.packed_object(saved)
            kept = packed.kept if isinstance(packed, HookedSave) else packed
            if isinstance(kept, Kept):
                yield node, slot, kept


def relative_error(right: Any, wrong: Any) -> float:
    """Return the relative error of ``wrong``; elements that are NaN or the same infinity in both count as equal."""
    same = (wrong == right) | (wrong.isnan() & right.isnan())
    gap, size = _norm((wrong - right).masked_fill(same, 0)), _norm(right)
    return gap / size if size else (float("inf") if gap else 0.0)


def is_rounding(error: float, right: Any) -> bool:
    """Whether an error is only rounding: then the gradients are the same."""
    return bool(error <= _ROUNDINGS * torch.finfo(right.dtype).eps)


def is_same(right: Any, wrong: Any) -> bool:
    """Whether two gradients are the same up to rounding."""
    return torch.is_tensor(wrong) and is_rounding(relative_error(right, wrong), right)


def _norm(tensor: torch.Tensor) -> float:
    parts = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return float(torch.linalg.vector_norm(parts.to(torch.float64)))
