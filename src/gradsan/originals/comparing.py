"""Comparison of saved values with their originals, those on one device with one wait, and of gradients."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, Protocol

import torch

from gradsan import _torch
from gradsan.model import Deviation
from gradsan.originals.originals import Kept, KnownOutside, as_integers
from gradsan.record.ledger import RawWrite
from gradsan.record.log import Core, Log, has_native_core
from gradsan.record.user_hooks import HookedSave

_STORAGE = RawWrite._fields.index("storage")
_ROUNDINGS = 8

# A walk of the graph takes some ten times as long for a value as a look at it does.
_LIVE_FOR_ONE_REACHED = 8
_REACHED_AT_LEAST = 64
_COMPARED_UNREACHED = 256
_BACKWARDS_BETWEEN_WALKS = 32
_LIVE_FOR_ONE_COUNT = 1024
_DEAD_BETWEEN_LOOKS = 10_000


class SavedValues(Protocol):
    """The kept values that live, and the hooks that keep and hand out."""

    pack: Callable[[Any], Any]
    unpack: Callable[[Any], Any]
    is_off: bool
    """Whether the hooks in Python are asked for every value."""
    on_kept: Callable[[Kept], None] | None
    """Called with each value that was kept without asking the hook in Python."""

    @property
    def count(self) -> int:
        """How many live, or a few more."""

    def add(self, kept: Kept, /) -> None:
        """Follow a value that was just saved."""

    def live(self) -> list[Kept]:
        """Those that live, oldest first."""

    def doubtful(self) -> list[Kept]:
        """Those of them of which it takes a look at their bytes to know that they are as they were."""


class _PureValues:
    """The kept values that live, all of which the hooks in Python have kept."""

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
        # Other threads add meanwhile, and what dies in a collection adds nothing.
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
    """None yet. ``pack`` and ``unpack`` are the hooks in Python, which are asked where a value is not an ordinary one.

    They are asked for values in storages that are among ``exempt``, and handing out while any of ``readers`` holds
    something.
    """
    if core.is_native and has_native_core():
        from gradsan.record import _native

        return _native.SavedValues(core, Kept, pack, unpack, exempt, readers)
    return _PureValues(pack, unpack)


class LiveValues:
    """The kept values that live, of all graphs: where none of them has changed, no graph need be walked."""

    def __init__(self, values: SavedValues) -> None:
        """``values`` knows them."""
        self._values = values
        self._reached = self._until_walk = 0

    def walked(self, reached: int) -> None:
        """A graph with so many values has been walked."""
        self._reached, self._until_walk = reached, _BACKWARDS_BETWEEN_WALKS

    def doubtful(self) -> list[Kept] | None:
        """Those that may have changed; None where a walk of one graph is less work than to compare them."""
        self._until_walk -= 1
        if self._until_walk < 0 or not self._are_few():
            return None
        doubtful = self._values.doubtful()
        return doubtful if len(doubtful) <= _COMPARED_UNREACHED else None

    def may_lie_in(self, storages: Collection[int]) -> bool:
        """Whether any value that lives lies in one of these; True where a walk of one graph is less work."""
        if not storages:
            return False
        if not self._are_few():
            return True
        return any(_torch.storage_or_none(kept.alias) in storages for kept in self._values.live())

    def _are_few(self) -> bool:
        return self._values.count <= _LIVE_FOR_ONE_REACHED * max(self._reached, _REACHED_AT_LEAST)


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


WORTH_MOST = 3


def worth_of(raises: bool, changed: bool, deviation: Deviation | None) -> int:
    """How much there is to report; of a value that several backwards ask for, more is reported when there is more."""
    if raises:
        return WORTH_MOST
    return 1 if not changed or (deviation is not None and not deviation.errors) else 2


def kept_in(nodes: list[Any]) -> Iterator[tuple[Any, str, Kept]]:
    """(Node, slot, what was kept) of the saved tensors of some Nodes."""
    for node in nodes:
        for slot, saved in _torch.saved_slots(node):
            packed = _torch.packed_object(saved)
            kept = packed.kept if isinstance(packed, HookedSave) else packed
            if isinstance(kept, Kept):
                yield node, slot, kept


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
