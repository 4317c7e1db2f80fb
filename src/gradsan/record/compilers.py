"""Hooks into torch.compile: gradsan's own functions are kept out of it, and traced graphs are kept.

The graph of a failed compilation is kept on its error, others in ``TRACED``: a compiled graph is one Node, and
only the traced graph shows which line of it saves which value.
"""

from __future__ import annotations

import functools
import sys
from collections import deque
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

from gradsan import _torch
from gradsan._imports import call_after_import, modules_loaded
from gradsan.record.guarding import Guard
from gradsan.record.patches import Patches

Run = Callable[[Callable[[], object]], None]


def install(patches: Patches, guard: Run) -> None:
    """Hook in now, or once the program has imported torch.compile's machinery, until ``patches`` is undone."""

    def watch() -> None:
        kind = _torch.compiler_error_class()
        if kind is not None:
            guard(lambda: _watch(kind, patches, guard))

    patches.on_undo(call_after_import(_torch.COMPILER_ERRORS, watch))
    patches.on_undo(call_after_import(_torch.GRAPH_BUILDER, lambda: guard(lambda: _keep_graphs(patches, guard))))
    patches.on_undo(call_after_import(_torch.COMPILER_FRAMES, lambda: guard(leave_own_frames)))


class TracedGraphs:
    """The latest graphs traced while gradsan was on, kept as long as the process lives, like the compiled code."""

    def __init__(self) -> None:
        self._kept: deque[_torch.Traced] = deque(maxlen=_GRAPHS_KEPT)
        self.on_first: Callable[[], None] | None = None
        """Called when there is a graph."""

    def keep(self, traced: _torch.Traced) -> None:
        """Keep one more graph; drops the oldest one beyond the bound."""
        self._kept.append(traced)
        self.publish()

    def publish(self) -> None:
        """Call ``on_first`` if there is a graph."""
        if self._kept and self.on_first is not None:
            self.on_first()

    def numbered(self, number: int | None) -> _torch.Traced | None:
        """Return the traced graph from which the autograd graph with this number was made; None if unknown."""
        return next((one for one in reversed(self._kept) if number is not None and one.first <= number < one.end), None)

    def latest(self) -> tuple[_torch.Traced, ...]:
        """Return all kept graphs, in the order in which they were traced."""
        return tuple(self._kept)

    def of_function(self, file: str, function: str) -> tuple[_torch.Traced, ...]:
        """Return the graphs of a function, the latest first."""
        return tuple(one for one in reversed(self._kept) if (one.file, one.function) == (file, function))


_GRAPHS_KEPT = 512
TRACED = TracedGraphs()


def _keep_graphs(patches: Patches, guard: Run) -> None:
    builder_class = _torch.graph_builder()
    if builder_class is None:
        return
    original = builder_class.call_user_compiler

    @functools.wraps(original)
    def call_user_compiler(builder: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
        copies: list[_torch.Traced] = []
        code = _torch.code_of_builder(builder)
        if code is not None:
            guard(lambda: copies.append(_torch.traced_copy(module, code)))
        first = _torch.graphs_numbered()
        try:
            return original(builder, module, *args, **kwargs)
        finally:
            for one in copies:
                TRACED.keep(one._replace(first=first, end=_torch.graphs_numbered()))

    patches.set(builder_class, "call_user_compiler", call_user_compiler)


def _watch(kind: Any, patches: Patches, guard: Run) -> None:
    original = kind.__init__

    @functools.wraps(original)
    def init(error: Any, *args: Any, **kwargs: Any) -> None:
        original(error, *args, **kwargs)
        frame = sys._getframe(1)
        guard(lambda: _torch.keep_traced_graph(error, frame))

    patches.set(kind, "__init__", init)


def leave_own_frames() -> None:
    """Have the compiler, if it is loaded, skip the functions of all loaded modules of gradsan.

    Code that cannot be traced runs with the compiler still intercepting every new frame, gradsan's too.
    """
    if _torch.COMPILER_FRAMES not in sys.modules:
        return
    loaded = modules_loaded()
    if _left_at == [loaded]:
        return
    _left_at[:] = [loaded]
    alone = {function.__code__ for function in (Guard.run, Guard.run_hushed)}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] != _PACKAGE or name in _left:
            continue
        _left.add(name)
        for code in _codes_of(module):
            # A guard runs only gradsan's own work, callees included; a wrapper calls the program's functions.
            _torch.never_compile(code, with_callees=code in alone)


def _codes_of(module: ModuleType) -> Iterator[CodeType]:
    """The code of every function that a module defines, methods and functions within functions included."""
    waiting: list[Any] = list(vars(module).values())
    seen: set[int] = set()
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, CodeType):
            yield one
            waiting += [constant for constant in one.co_consts if isinstance(constant, CodeType)]
        elif isinstance(one, (staticmethod, classmethod)):
            waiting.append(one.__func__)
        elif isinstance(one, property):
            waiting += [one.fget, one.fset]
        elif getattr(one, "__module__", None) == module.__name__:
            if isinstance(one, type):
                waiting += vars(one).values()
            elif isinstance(one, FunctionType):
                # ``contextmanager`` and ``cache`` keep what they wrap.
                waiting += [one.__code__, getattr(one, "__wrapped__", None)]
            else:
                waiting.append(getattr(one, "__wrapped__", None))


_PACKAGE = __name__.partition(".")[0]
_left: set[str] = set()
_left_at: list[tuple[int, str]] = []
"""The modules loaded when all were last gone through."""
