"""The program's own saved-tensor hooks: PyTorch checks no versions under them, so gradsan does."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.autograd import graph

from gradsan.capture import _torch
from gradsan.capture.patches import Patches


class HookedSave:
    """A save that the user's own hooks packed: what they returned, and the tensors in it that alias the original."""

    __slots__ = ("aliases", "clock", "packed", "stack", "unpack")

    def __init__(
        self, packed: Any, unpack: Callable[[Any], Any], aliases: tuple[tuple[Any, int], ...], clock: int, stack: Any
    ):
        """``aliases`` are (tensor, version at save) of every tensor in ``packed`` that shares the original's memory."""
        self.packed = packed
        self.unpack = unpack
        self.aliases = aliases
        self.clock = clock
        self.stack = stack


def watch_user_hooks(core: Any, patches: Patches, on_hooked_stale: Callable[[HookedSave, Any], None]) -> None:
    """Check what the program's hooks keep, whenever it enters ``saved_tensors_hooks`` from now on."""
    enter = graph.saved_tensors_hooks.__enter__
    hooks_class = graph.saved_tensors_hooks

    @functools.wraps(enter)
    def enter_watched(self: Any) -> Any:
        pack, unpack = self.pack_hook, self.unpack_hook
        if not core.active or isinstance(pack, _Composed):
            return enter(self)
        self.pack_hook, self.unpack_hook = _compose(core, pack, unpack, on_hooked_stale)
        try:
            return enter(self)
        finally:
            self.pack_hook, self.unpack_hook = pack, unpack

    patches.set(hooks_class, "__enter__", enter_watched)


class _Composed:
    """A pack hook made of the user's own and gradsan's bookkeeping."""

    __slots__ = ("_call",)

    def __init__(self, call: Callable[[Any], Any]) -> None:
        self._call = call

    def __call__(self, tensor: Any) -> Any:
        return self._call(tensor)


def _compose(
    core: Any,
    pack: Callable[[Any], Any],
    unpack: Callable[[Any], Any],
    on_hooked_stale: Callable[[HookedSave, Any], None],
) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    def pack_watched(tensor: Any) -> Any:
        packed = pack(tensor)
        if not core.active:
            return packed
        clock = core.tick()
        core.saves += 1
        aliases = tuple(
            (alias, alias._version)
            for alias in _tensors_in(packed)
            if _torch.storage_identity(alias) == _torch.storage_identity(tensor)
        )
        return HookedSave(packed, unpack, aliases, clock, core.stack(1))

    def unpack_watched(save: Any) -> Any:
        if not isinstance(save, HookedSave):
            return unpack(save)
        stale = next((alias for alias, version in save.aliases if alias._version != version), None)
        result = unpack(save.packed)
        # A hook that checks for itself and raises has hidden nothing.
        if stale is not None:
            on_hooked_stale(save, stale)
        return result

    return _Composed(pack_watched), unpack_watched


def _tensors_in(packed: Any, depth: int = 3) -> Iterator[Any]:
    if torch.is_tensor(packed):
        yield packed
    elif depth and isinstance(packed, (tuple, list)):
        for item in packed:
            yield from _tensors_in(item, depth - 1)
    elif depth and isinstance(packed, dict):
        for item in packed.values():
            yield from _tensors_in(item, depth - 1)
    elif depth and hasattr(packed, "__dict__") and not isinstance(packed, type):
        for item in list(vars(packed).values()):
            if torch.is_tensor(item):
                yield item
