"""Listener registry for backward calls, new Nodes and results; the core calls it only while it has listeners."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

from gradsan import _torch
from gradsan.record.guarding import Guard
from gradsan.record.log import Core, RawStack
from gradsan.record.patches import Patches, standing
from gradsan.record.steps import RawBackward, as_backward

_STACKS_KNOWN = 256

BeforeBackward = Callable[[RawBackward, tuple[Any, ...], dict[str, Any]], None]
"""Called with an entry of ``core.running`` and the engine's other arguments, positional and named."""

AfterBackward = Callable[[RawBackward], None]
"""Called with an entry of ``core.running`` whose backward has succeeded."""

OnNonFinite = Callable[[RawBackward], None]
"""Called with an entry of ``core.running`` whose outputs may not be finite."""

OnResult = Callable[[str, tuple[Any, ...], dict[str, Any], Any], None]
"""Called with the name, the arguments and the result of a call; exceptions in it are counted and dropped."""

AfterNodes = Callable[[Any, int, int], None]
"""Called with an object holding the Nodes that a call made, the number of the first, and the last's plus one."""


class Listeners:
    """Listeners of one core, called in the order of registration, each under ``guard``.

    Tuples are replaced rather than changed, as one may be iterated over meanwhile.
    """

    def __init__(self, core: Core, guard: Guard) -> None:
        """Start without listeners to ``core``."""
        self._core, self.guard = core, guard
        self.before_backward: tuple[BeforeBackward, ...] = ()
        self.after_backward: tuple[AfterBackward, ...] = ()
        self.after_nodes: tuple[AfterNodes, ...] = ()
        self.on_result: tuple[OnResult, ...] = ()
        self.around: AbstractContextManager[object] = nullcontext()
        """Entered around all listeners before a backward, or after it."""
        self._nonfinite: OnNonFinite | None = None
        self._traced: dict[Any, bool] = {}

    def call_before_backward(self, listener: BeforeBackward, wanted: bool = True) -> None:
        """Call ``listener`` once before each backward from now on, or no longer."""
        self.before_backward = _with(self.before_backward, listener, wanted)
        self.follow()

    def call_on_nonfinite(self, listener: OnNonFinite | None) -> None:
        """Call ``listener``, and no other, before each backward whose outputs are not known to be finite."""
        self._nonfinite = listener
        self._core.on_nonfinite = None if listener is None else self._on_nonfinite

    def call_after_backward(self, listener: AfterBackward, wanted: bool = True) -> None:
        """Call ``listener`` once after each backward from now on, or no longer."""
        self.after_backward = _with(self.after_backward, listener, wanted)
        self.follow()

    def call_after_nodes(self, listener: AfterNodes, wanted: bool = True) -> None:
        """Call ``listener`` once after each call that makes Nodes from now on, or no longer."""
        self.after_nodes = _with(self.after_nodes, listener, wanted)
        self.follow()

    def call_on_result(self, listener: OnResult, wanted: bool = True) -> None:
        """Call ``listener`` once with the result of every call from now on, or no longer.

        This costs some microseconds a call. While the search for NaN and Inf uses the core's hook, no other is called.
        """
        self.on_result = _with(self.on_result, listener, wanted)
        if self._core.on_result in (None, self._on_result):
            self._core.on_result = self._on_result if self.on_result else None

    @contextmanager
    def without_results(self) -> Iterator[None]:
        """A block of which no listener gets results: gradsan computes with the program's tensors."""
        held, self._core.on_result = self._core.on_result, None
        try:
            yield
        finally:
            self._core.on_result = held

    def follow(self) -> None:
        """Set or clear the core's callbacks, depending on whether there are listeners."""
        core = self._core
        core.on_enter = self._on_enter if self.before_backward else None
        core.on_leave = self._on_leave if self.after_backward else None
        core.on_nodes = self._on_nodes if self.after_nodes else None

    def is_traced(self, entry: RawBackward) -> bool:
        """Whether torch.compile traces this call into the engine: its tensors are not the program's."""
        # Tracing runs within dispatch modes; cheap, as it is checked at every backward of every program.
        if not _torch.has_dispatch_modes():
            return False
        stack = as_backward(entry).stack
        found = self._traced.get(stack)
        if found is None:
            if len(self._traced) >= _STACKS_KNOWN:
                self._traced.clear()
            found = self._traced[stack] = _torch.is_within_graph_capture(stack.codes)
        return found

    def _on_enter(self, entry: RawBackward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.is_traced(entry):
            return
        backward = as_backward(entry)
        with self.around:
            for listener in self.before_backward:
                self.guard.run(partial(listener, backward, args, kwargs))

    def _on_nonfinite(self, entry: RawBackward) -> None:
        if self._nonfinite is not None and not self.is_traced(entry):
            self.guard.run(partial(self._nonfinite, as_backward(entry)))

    def _on_leave(self, entry: RawBackward) -> None:
        if self.is_traced(entry):
            return
        backward = as_backward(entry)
        with self.around:
            for listener in self.after_backward:
                self.guard.run(partial(listener, backward))

    def _on_result(self, op: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        with _torch.hushed():
            for listener in self.on_result:
                listener(op, args, kwargs, result)

    def _on_nodes(self, holder: Any, first: int, end: int) -> None:
        for listener in self.after_nodes:
            self.guard.run_hushed(partial(listener, holder, first, end))


def _with(listeners: tuple[Any, ...], listener: Any, wanted: bool) -> tuple[Any, ...]:
    if not wanted:
        return tuple(one for one in listeners if one != listener)
    return listeners if listener in listeners else (*listeners, listener)


def watch_after(
    core: Core,
    patches: Patches,
    guard: Callable[[Callable[[], object]], None],
    owner: Any,
    name: str,
    note: Callable[[Any, tuple[Any, ...], dict[str, Any], RawStack], object],
    is_due: Callable[[tuple[Any, ...], dict[str, Any]], bool] = lambda args, kwargs: True,
) -> None:
    """Call ``note`` with the result, the arguments and the stack of each call of a function, until ``patches`` ends."""
    original = standing(owner, name)
    if original is None:
        return

    def called(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        if is_due(args, kwargs) and not _torch.is_compiling():
            stack = core.stack(1)
            guard(lambda: note(result, args, kwargs, stack))

    watched = core.listener(original, None, called)
    patches.set(owner, name, watched)
    shown = _torch.ShownToModes([(original, watched)])
    shown.put()
    patches.on_undo(shown.undo)
