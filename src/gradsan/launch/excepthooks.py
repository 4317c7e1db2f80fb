"""Exceptions that nobody catches, looked at before they are shown: of the program, of threads, of multiprocessing."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

Listener = Callable[[BaseException], None]


def call_before_shown(listener: Listener) -> Callable[[], None]:
    """Have ``listener``, which must not raise, called with what ends the program or a thread; returns how to undo it.

    A process of multiprocessing shows its exceptions itself; there it is called when they leave its target.
    """
    undo = [_in_python(listener), _in_threads(listener), call_in_multiprocessing(listener)]

    def undo_all() -> None:
        for one in undo:
            one()

    return undo_all


def _in_python(listener: Listener) -> Callable[[], None]:
    shown, is_on = sys.excepthook, True

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if is_on and isinstance(error, BaseException):
            listener(error if error.__traceback__ is not None else error.with_traceback(trace))
        shown(kind, error, trace)

    def undo() -> None:
        nonlocal is_on
        is_on = False
        if sys.excepthook is show:
            sys.excepthook = shown

    sys.excepthook = show
    return undo


def _in_threads(listener: Listener) -> Callable[[], None]:
    shown, is_on = threading.excepthook, True

    def show(args: threading.ExceptHookArgs) -> None:
        if is_on and args.exc_value is not None:
            listener(args.exc_value)
        shown(args)

    def undo() -> None:
        nonlocal is_on
        is_on = False
        if threading.excepthook is show:
            threading.excepthook = shown

    threading.excepthook = show
    return undo


class _Anchor:
    """multiprocessing keeps its hook as long as this lives."""

    def __init__(self, listener: Listener) -> None:
        self.listener: Listener | None = listener


def call_in_multiprocessing(listener: Listener) -> Callable[[], None]:
    """The same for processes of multiprocessing alone: those that this one forks from now on, and this one itself."""
    util: Any = sys.modules.get("multiprocessing.util")
    process: Any = sys.modules.get("multiprocessing.process")
    if util is None or process is None:
        return lambda: None
    anchor = _Anchor(listener)
    util.register_after_fork(anchor, _await_end)
    # A spawned one imports torch before it knows its parent, and runs no hooks of a fork.
    if process.parent_process() is not None or "--multiprocessing-fork" in sys.orig_argv:
        _await_end(anchor)

    def undo() -> None:
        anchor.listener = None
        for key, kept in list(util._afterfork_registry.items()):
            if kept is anchor:
                util._afterfork_registry.pop(key, None)

    return undo


def _await_end(anchor: _Anchor) -> None:
    """In a process of multiprocessing: look at what is on its way out when the target has ended."""
    util = sys.modules["multiprocessing.util"]

    def look() -> None:
        error = sys.exc_info()[1]
        # torch.multiprocessing writes an error down and leaves by SystemExit.
        error = error.__context__ if isinstance(error, SystemExit) else error
        if error is not None and anchor.listener is not None:
            anchor.listener(error)

    util.Finalize(None, look, exitpriority=0)
