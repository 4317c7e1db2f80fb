"""Default saved-tensor hooks of gradsan, in every thread, below those of the program."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

from gradsan import _torch
from gradsan._imports import call_after_import
from gradsan.model import Message
from gradsan.record.log import Core
from gradsan.record.patches import Patches


def relays(
    core: Core, pack: Callable[[Any], tuple[Any]], unpack: Callable[[Any], tuple[Any] | None]
) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """Return a pair of hooks without a frame of their own; ``unpack`` may leave a value to the program's own hook."""
    return core.relay(pack, pack, None), core.relay(_by_the_programs, unpack, None)


class DefaultHooks:
    """One pair of hooks, pushed where hooks are allowed."""

    def __init__(
        self,
        core: Core,
        pack: Callable[[Any], Any],
        unpack: Callable[[Any], Any],
        note: Callable[[Message], None],
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
