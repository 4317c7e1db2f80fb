"""Saved tensors for Python code in deep mode: the very objects, in slots that accept and show the program's hooks."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction

from gradsan import _torch
from gradsan.originals.originals import Kept
from gradsan.record.log import Log
from gradsan.record.patches import Patches

_WRITES_ITS_INPUT = (
    "A saved tensor pack hook is modifying its input in place. Tensors provided as input to pack hook cannot be "
    "modified by in-place operations as this can lead to unexpected side-effects. Please open an issue if you need to "
    "perform in-place operations on the input to a pack hook."
)


class HandedOut:
    """Replaces ``ctx.saved_tensors`` and attributes of ``SavedTensor``, since the slots have hooks of gradsan's.

    A slot with hooks makes a new tensor each time it is read, accepts no further hooks and shows these. Before
    2.10, where a slot does not show its content, only leaves are the very objects.
    """

    def __init__(self, core: Log) -> None:
        """Prepare; nothing is replaced yet. ``knows_readers``: the slots' own Python attributes can be replaced."""
        self._core = core
        self._readers: set[int] = set()
        self.knows_readers = False
        self._unpacked: dict[int, list[Kept]] = {}
        self.readers = (self._readers, self._unpacked)
        """The threads that are reading a custom Function's saved tensors."""

    def install(self, patches: Patches) -> None:
        """Replace these attributes until ``patches`` is undone."""
        kind = _torch.SAVED_TENSOR
        if hasattr(kind, "data"):
            self.knows_readers = True
            patches.set(BackwardCFunction, "saved_tensors", property(self._saved_tensors))
            patches.set(kind, "register_hooks", self._registering(kind.register_hooks))
            patches.set(kind, "data", _shown(kind, "data", _data_of))
            patches.set(kind, "unpack_hook", _shown(kind, "unpack_hook", lambda kept: kept.hooks and kept.hooks[1]))
        else:
            patches.set(BackwardCFunction, "saved_tensors", property(self._with_very_leaves))

    def is_asked_by_function(self) -> bool:
        """Whether this thread is reading ``ctx.saved_tensors`` of a custom Function."""
        readers = self._readers or self._unpacked
        return bool(readers) and threading.get_ident() in readers

    def unpacks(self, kept: Kept) -> None:
        """Note a value that is unpacked; to be called for each."""
        if self._unpacked and (read := self._unpacked.get(threading.get_ident())) is not None:
            read.append(kept)

    def _saved_tensors(self, function: Any) -> Any:
        """Return ``ctx.saved_tensors`` of a custom Function."""
        thread = threading.get_ident()
        self._readers.add(thread)
        try:
            given = _torch.SAVED_TENSORS.__get__(function)
        finally:
            self._readers.discard(thread)
        slots = _torch.slots_of_function(function)
        if not isinstance(given, tuple) or len(slots) != len(given):
            return given
        return tuple(map(_very_tensor, slots, given))

    def _with_very_leaves(self, function: Any) -> Any:
        """Return ``ctx.saved_tensors`` before 2.10."""
        thread = threading.get_ident()
        # A hook of the program's may read those of another Function meanwhile, as checkpointing does.
        outer, unpacked = self._unpacked.get(thread), list[Kept]()
        self._unpacked[thread] = unpacked
        try:
            given = _torch.SAVED_TENSORS.__get__(function)
        finally:
            if outer is None:
                del self._unpacked[thread]
            else:
                self._unpacked[thread] = outer
        if not isinstance(given, tuple) or len(unpacked) != sum(one is not None for one in given):
            return given
        kept = iter(unpacked)
        return tuple(None if one is None else _very_leaf(next(kept), one) for one in given)

    def _registering(self, register: Any) -> Any:
        @functools.wraps(register)
        def registering(saved: Any, *hooks: Any, **named: Any) -> Any:
            if named or len(hooks) != 2 or not all(map(callable, hooks)):
                return register(saved, *hooks, **named)  # whose slot may be gone with its Node: torch does not read it
            kept = _torch.packed_object(saved)
            if not isinstance(kept, Kept) or kept.hooks is not None:
                return register(saved, *hooks)
            pack, unpack = hooks
            with torch.no_grad():
                value = kept.alias.detach()
                version = value._version
                packed = pack(value)
            if value._version != version:
                raise RuntimeError(_WRITES_ITS_INPUT)
            kept.set_program_hooks(packed, unpack)
            return None

        return registering


def _shown(kind: Any, name: str, shown: Callable[[Kept], Any]) -> property:
    """Return a property for a slot's attribute: ``shown`` computes it where gradsan's hooks are in the slot."""
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


def _very_leaf(kept: Kept, given: Any) -> Any:
    """Return the saved leaf; for a healed value, a tensor that leaves the gradient hooks to the leaf."""
    leaf = kept.very_tensor if kept.was_leaf and kept.requires_grad and kept.hooks is None else None
    if leaf is None or leaf is given or not torch.is_tensor(given):
        return given
    if leaf is kept.alias or _torch.is_at(given, leaf):
        _torch.let_go(given)
        return leaf
    if not torch.is_grad_enabled():  # otherwise a gradient is to reach the leaf from here
        with _torch.hushed(), _torch.without_dispatch_modes():
            value = _torch.detached(given)
            _torch.let_go(given)
            _torch.give_memory(given, value)
    return given
