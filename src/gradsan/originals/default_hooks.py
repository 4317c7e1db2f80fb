"""Saved-tensor hooks of deep mode, in every thread, below the program's; the slots of Nodes that Python code reads."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction

from gradsan import _torch
from gradsan._imports import call_after_import
from gradsan.model import Message
from gradsan.originals.originals import Kept
from gradsan.record.log import Core, Log
from gradsan.record.patches import Patches


def relays(
    core: Core, pack: Callable[[Any], tuple[Any]], unpack: Callable[[Any], tuple[Any] | None]
) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """Return a pair of hooks without a frame of their own; ``unpack`` may leave a value to the program's own hook."""
    return core.relay(pack, pack, None), core.relay(_by_the_programs, unpack, None)


class DefaultHooks:
    """One pair of hooks, pushed where hooks are allowed."""

    def __init__(
        self, core: Core, pack: Callable[[Any], Any], unpack: Callable[[Any], Any], note: Callable[[Message], None]
    ) -> None:
        """Store the hooks; ``note`` is called where hooks are forbidden for a while."""
        self._core, self._note, self._pack, self._unpack = core, note, pack, unpack
        self._local = threading.local()

    def install(self, patches: Patches) -> None:
        """Push the hooks in this thread and in those that start from now on, until ``patches`` is undone."""
        self._push()
        patches.on_undo(self._pop)
        self._follow_threads(patches)
        self._step_aside(patches)
        patches.on_undo(call_after_import(_torch.TRACER, lambda: self._step_aside_of_tracers(patches)))

    def _push(self) -> None:
        is_traced = bool(getattr(self._local, "tracers", 0))
        if is_traced or getattr(self._local, "pushed", False) or _torch.hooks_forbidden() is not None:
            return
        _torch.push_hooks(self._pack, self._unpack)
        self._local.pushed = True

    def _pop(self) -> None:
        if not getattr(self._local, "pushed", False):
            return
        top = _torch.top_hooks()
        # If the program has entered hooks since, and not left them, ours stay below them.
        if top is None or top[0] == self._pack:
            _torch.pop_hooks()
            self._local.pushed = False

    def _follow_threads(self, patches: Patches) -> None:
        run = threading.Thread._bootstrap_inner  # type: ignore[attr-defined]
        own = self

        @functools.wraps(run)
        def hooked(self: Any) -> Any:
            if not own._core.active:
                return run(self)
            own._push()
            try:
                return run(self)
            finally:
                own._pop()

        patches.set(threading.Thread, "_bootstrap_inner", hooked)

    def _step_aside(self, patches: Patches) -> None:
        """Pop our hooks before hooks are forbidden (by functorch), and push them again afterwards."""
        switch = _torch.hooks_switch()
        if switch is None:
            return
        disable, enable = switch._saved_tensors_hooks_disable, switch._saved_tensors_hooks_enable

        @functools.wraps(disable)
        def disabled(*args: Any, **kwargs: Any) -> Any:
            if getattr(self._local, "pushed", False):
                self._note(Message("blind.hooks_forbidden", {"reason": str(args[0]) if args else ""}))
                self._pop()
            return disable(*args, **kwargs)

        @functools.wraps(enable)
        def enabled(*args: Any, **kwargs: Any) -> Any:
            result = enable(*args, **kwargs)
            if self._core.active:
                self._push()
            return result

        patches.set(switch, "_saved_tensors_hooks_disable", disabled)
        patches.set(switch, "_saved_tensors_hooks_enable", enabled)

    def _step_aside_of_tracers(self, patches: Patches) -> None:
        """Pop our hooks while a tracer is active: it knows a value by its very tensor, any other becomes a constant."""
        kind = _torch.tracer_class()
        if kind is None:
            return
        enter, leave = kind.__enter__, kind.__exit__

        @functools.wraps(enter)
        def entered(mode: Any) -> Any:
            self._pop()
            self._local.tracers = getattr(self._local, "tracers", 0) + 1
            return enter(mode)

        @functools.wraps(leave)
        def left(mode: Any, *error: Any) -> Any:
            result = leave(mode, *error)
            # A mode that was entered before gradsan was switched on was not counted.
            self._local.tracers = max(0, getattr(self._local, "tracers", 0) - 1)
            if self._core.active:
                self._push()
            return result

        patches.set(kind, "__enter__", entered)
        patches.set(kind, "__exit__", left)


def _by_the_programs(kept: Any) -> Any:
    packed, unpack = kept.hooks
    return unpack(packed)


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
