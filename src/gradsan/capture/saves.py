"""Saved-tensor hooks: ours in every thread, the user's own on top, and stepping aside where torch forbids hooks."""

from __future__ import annotations

import contextlib
import functools
import threading
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


def install(core: Any, patches: Patches, on_hooked_stale: Callable[[HookedSave, Any], None]) -> None:
    """Hook saves in this thread, in threads started from now on, and underneath every hook pair the program pushes."""
    _push(core)
    patches.on_undo(functools.partial(_pop, core))
    _cover_new_threads(core, patches)
    _wrap_user_hooks(core, patches, on_hooked_stale)
    _step_aside_where_forbidden(core, patches)


def is_ours(core: Any, pair: tuple[Any, Any] | None) -> bool:
    """Whether a (pack, unpack) pair is gradsan's own."""
    return pair is not None and pair[0] is core.pack


def hooks_are_on_top(core: Any) -> bool:
    """Whether gradsan's pair is the one that runs in this thread."""
    return is_ours(core, _torch.top_hooks())


_ours_here = threading.local()


def _push(core: Any) -> bool:
    if _torch.hooks_forbidden():
        return False
    _torch.push_hooks(core.pack, core.unpack)
    _ours_here.depth = getattr(_ours_here, "depth", 0) + 1
    return True


def _pop(core: Any) -> None:
    """Take our pair out of this thread's hooks, also from beneath pairs that the program pushed after it."""
    if not getattr(_ours_here, "depth", 0):
        return
    above = []
    while (pair := _torch.top_hooks()) is not None and not is_ours(core, pair):
        _torch.pop_hooks()
        above.append(pair)
    if pair is not None:
        _torch.pop_hooks()
        _ours_here.depth -= 1
    for pack, unpack in reversed(above):
        _torch.push_hooks(pack, unpack)


def _cover_new_threads(core: Any, patches: Patches) -> None:
    start = threading.Thread.start

    @functools.wraps(start)
    def start_watched(thread: threading.Thread) -> None:
        run = thread.run

        def run_watched() -> None:
            watching = core.active and _push(core)
            try:
                # The instance attribute goes before the program's code runs: nothing may be left on its objects.
                thread.__dict__.pop("run", None)
                run()
            finally:
                if watching:
                    _pop(core)

        if core.active:
            thread.__dict__["run"] = run_watched
        try:
            start(thread)
        except BaseException:
            thread.__dict__.pop("run", None)
            raise

    patches.set(threading.Thread, "start", start_watched)


def _wrap_user_hooks(core: Any, patches: Patches, on_hooked_stale: Callable[[HookedSave, Any], None]) -> None:
    enter = graph.saved_tensors_hooks.__enter__
    hooks_class = graph.saved_tensors_hooks

    @functools.wraps(enter)
    def enter_watched(self: Any) -> Any:
        pack, unpack = self.pack_hook, self.unpack_hook
        if not core.active or pack is core.pack or isinstance(pack, _Composed):
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


def _step_aside_where_forbidden(core: Any, patches: Patches) -> None:
    disable = graph.disable_saved_tensors_hooks

    @contextlib.contextmanager
    @functools.wraps(disable)
    def disable_watched(error_message: str) -> Iterator[None]:
        # torch refuses to forbid hooks while a pair is active; ours is not the program's, so it may not be the reason.
        aside = hooks_are_on_top(core)
        if aside:
            _pop(core)
        try:
            with disable(error_message):
                yield
        finally:
            if aside and core.active:
                _push(core)

    patches.set(graph, "disable_saved_tensors_hooks", disable_watched)
