"""Saved tensors as Python code gets them in deep mode: the very objects, in slots that take and show its own hooks."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction

from gradsan.capture import _torch
from gradsan.capture.originals import Kept
from gradsan.capture.patches import Patches

_WRITES_ITS_INPUT = (
    "A saved tensor pack hook is modifying its input in place. Tensors provided as input to pack hook cannot be "
    "modified by in-place operations as this can lead to unexpected side-effects. Please open an issue if you need to "
    "perform in-place operations on the input to a pack hook."
)


class HandedOut:
    """Stands before ``ctx.saved_tensors`` and a ``SavedTensor``'s own, as hooks of gradsan's stand in the slots.

    Of a slot with hooks PyTorch makes a new tensor each time it is read, takes no further hooks and shows these.
    """

    def __init__(self, core: Any) -> None:
        """Prepare; nothing is replaced yet.

        ``readers`` are the threads that read ``ctx.saved_tensors`` just now; they are known if ``knows_readers``.
        """
        self._core = core
        self.readers: set[int] = set()
        self.knows_readers = False

    def install(self, patches: Patches) -> None:
        """Replace both until ``patches`` is undone."""
        kind = _torch.SAVED_TENSOR
        # Before 2.10 nothing tells what a slot holds.
        if hasattr(kind, "data"):
            self.knows_readers = True
            patches.set(BackwardCFunction, "saved_tensors", property(self._saved_tensors))
            patches.set(kind, "register_hooks", self._registering(kind.register_hooks))
            patches.set(kind, "data", _shown(kind, "data", _data_of))
            patches.set(kind, "unpack_hook", _shown(kind, "unpack_hook", lambda kept: kept.hooks and kept.hooks[1]))

    def _saved_tensors(self, function: Any) -> Any:
        """``ctx.saved_tensors`` of a custom Function."""
        thread = threading.get_ident()
        self.readers.add(thread)
        try:
            given = _SAVED_TENSORS.__get__(function)
        finally:
            self.readers.discard(thread)
        slots = _torch.slots_of_function(function)
        if not isinstance(given, tuple) or len(slots) != len(given):
            return given
        return tuple(map(_very_tensor, slots, given))

    def _registering(self, register: Any) -> Any:
        @functools.wraps(register)
        def registering(saved: Any, *hooks: Any, **named: Any) -> Any:
            kept = _torch.packed_object(saved)
            are_ours = isinstance(kept, Kept) and kept.hooks is None
            if not are_ours or named or len(hooks) != 2 or not all(map(callable, hooks)):
                return register(saved, *hooks, **named)
            pack, unpack = hooks
            with torch.no_grad():
                value = kept.alias.detach()
                version = value._version
                packed = pack(value)
            if value._version != version:
                raise RuntimeError(_WRITES_ITS_INPUT)
            kept.give_way(packed, unpack)
            return None

        return registering


_SAVED_TENSORS: Any = BackwardCFunction.saved_tensors


def _shown(kind: Any, name: str, shown: Callable[[Kept], Any]) -> property:
    """An attribute of a slot as the program gets it; ``shown`` tells it of one that gradsan's hooks stand in."""
    read = vars(kind)[name]

    def get(saved: Any) -> Any:
        kept = _torch.packed_object(saved)
        return shown(kept) if isinstance(kept, Kept) else read.__get__(saved)

    return property(get)


def _data_of(kept: Kept) -> Any:
    if kept.hooks is not None:
        return kept.hooks[0]
    very = kept.very_tensor
    return kept.alias if very is None else very


def _very_tensor(slot: Any, given: Any) -> Any:
    kept = _torch.packed_object(slot)
    very = kept.very_tensor if isinstance(kept, Kept) and torch.is_tensor(given) else None
    return very if very is not None and (very is kept.alias or _torch.is_at(given, very)) else given
