"""Uncaught exceptions, handled as python handles them, without a trace of gradsan.

The order of events is that of ``PyErr_PrintEx`` and ``handle_system_exit`` in CPython's ``Python/pythonrun.c``.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

_OWN_FILES = str(Path(__file__).resolve().parent.parent)
_IMPORT_MACHINERY = "<frozen importlib"
_listeners: list[Callable[[BaseException], None]] = []


def call_when_uncaught(listener: Callable[[BaseException], None]) -> None:
    """Call ``listener`` with every exception that ends the program or a thread, before it is shown.

    It must not raise.
    """
    _listeners.append(listener)


def show_uncaught(failure: BaseException) -> int:
    """Pass ``failure``, without gradsan's frames, to ``sys.excepthook``; return python's exit status."""
    _tell(failure)
    remove_own_frames(failure)
    trace = failure.__traceback__
    sys.last_type, sys.last_value, sys.last_traceback = type(failure), failure, trace
    if sys.version_info >= (3, 12):
        sys.last_exc = failure
    from gradsan.launch.sentences import write_to_stderr

    hook = getattr(sys, "excepthook", None)
    if hook is None:
        write_to_stderr("sys.excepthook is missing\n")
        hook = sys.__excepthook__
    try:
        sys.audit("sys.excepthook", hook, type(failure), failure, trace)
        hook(type(failure), failure, trace)
    except SystemExit as leaving:
        return exit_status(leaving)
    except BaseException as second:
        remove_own_frames(second)
        write_to_stderr("Error in sys.excepthook:\n")
        sys.__excepthook__(type(second), second, second.__traceback__)
        write_to_stderr("\nOriginal exception was:\n")
        sys.__excepthook__(type(failure), failure, trace)
    return 1


def exit_status(leaving: SystemExit) -> int:
    """Return the status of ``leaving``; anything but a number is printed on stderr and means 1."""
    code = leaving.code
    if code is None:
        return 0
    if isinstance(code, int):
        return int(code)
    with contextlib.suppress(Exception):
        print(code, file=sys.stderr)
    return 1


def clean_tracebacks_of_threads() -> None:
    """Show exceptions that end a thread without gradsan's frames, too, unless the program has its own hook."""
    show = threading.excepthook

    def show_cleaned(args: threading.ExceptHookArgs) -> None:
        failure = args.exc_value
        if failure is not None:
            _tell(failure)
            remove_own_frames(failure)
            args = threading.ExceptHookArgs((args.exc_type, failure, failure.__traceback__, args.thread))
        show(args)

    threading.excepthook = show_cleaned


def wait_for_threads() -> bool:
    """Wait, like python at the end of the main program, for non-daemon threads.

    Calling the interpreter's own function is the only way that also ends thread pools; a second call does nothing.
    Returns True if ``SIGTERM`` arrived meanwhile, which ends the waiting and must still end the process: threads in a
    deadlock must not hold back the report.
    """
    came: list[int] = []
    try:
        with _ended_by_sigterm(came):
            threading._shutdown()  # type: ignore[attr-defined]
    except _TerminatedError:
        return True
    except BaseException as failure:
        from gradsan.launch.sentences import write_to_stderr

        remove_own_frames(failure)
        lines = "".join(traceback.format_tb(failure.__traceback__))
        words = f"{type(failure).__name__}: {failure}"
        write_to_stderr(f"Exception ignored in: {threading!r}\nTraceback (most recent call last):\n{lines}{words}\n")
    return bool(came)


class _TerminatedError(BaseException):
    """``SIGTERM`` has arrived."""


@contextlib.contextmanager
def _ended_by_sigterm(came: list[int]) -> Iterator[None]:
    """Raise :class:`_TerminatedError` if ``SIGTERM`` would end the process at once, and note it in ``came``."""
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    process = os.getpid()

    def end(number: int, _: Any) -> None:
        signal.signal(number, signal.SIG_DFL)
        if os.getpid() != process:
            # A child forked by one of the threads.
            signal.raise_signal(number)
        came.append(number)
        raise _TerminatedError

    show = sys.unraisablehook

    def show_others(args: Any) -> None:
        # Since 3.13 the interpreter shows exceptions that end its waiting, and goes on.
        if args.exc_type is not _TerminatedError:
            show(args)

    sys.unraisablehook = show_others
    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        if sys.unraisablehook is show_others:
            sys.unraisablehook = show
        if signal.getsignal(signal.SIGTERM) is end:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def run_exit_handlers() -> None:
    """Run the program's ``atexit`` handlers, as python does after its threads; running them twice is harmless.

    multiprocessing waits there for the children that it has started.
    """
    show = sys.unraisablehook

    def show_cleaned(args: Any) -> None:
        trace = _without_own_frames(args.exc_traceback)
        show(type(args)((args.exc_type, args.exc_value, trace, args.err_msg, args.object)))

    # An exception of a builtin has the frame of the caller of the handlers.
    sys.unraisablehook = show_cleaned
    try:
        atexit._run_exitfuncs()
    finally:
        if sys.unraisablehook is show_cleaned:
            sys.unraisablehook = show


def _tell(failure: BaseException) -> None:
    for listener in _listeners:
        listener(failure)


def remove_own_frames(failure: BaseException) -> None:
    """Remove gradsan's frames from the tracebacks of ``failure``, its causes, contexts and members."""
    waiting: list[BaseException | None] = [failure]
    seen: set[int] = set()
    while waiting:
        current = waiting.pop()
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        current.__traceback__ = _without_own_frames(current.__traceback__)
        waiting += [current.__cause__, current.__context__]
        members = getattr(current, "exceptions", ())
        if isinstance(members, tuple):
            waiting += [member for member in members if isinstance(member, BaseException)]


def _without_own_frames(trace: TracebackType | None) -> TracebackType | None:
    kept: list[TracebackType] = []
    while trace is not None:
        if not _file(trace).startswith(_OWN_FILES):
            kept.append(trace)
        else:
            # The import system removes its own frames, but not those in front of our hook on the import of torch.
            while kept and _file(kept[-1]).startswith(_IMPORT_MACHINERY):
                kept.pop()
        trace = trace.tb_next
    following = None
    for entry in reversed(kept):
        entry.tb_next = following
        following = entry
    return following


def _file(trace: TracebackType) -> str:
    return trace.tb_frame.f_code.co_filename


Listener = Callable[[BaseException], None]


def call_before_shown(listener: Listener) -> Callable[[], None]:
    """Call ``listener``, which must not raise, with exceptions that end the program or a thread; return its undo.

    A process of multiprocessing shows its exceptions itself; there it is called when they leave its target.
    """
    undo = [in_excepthook(sys, listener), in_excepthook(threading, listener), call_in_multiprocessing(listener)]

    def undo_all() -> None:
        for one in undo:
            one()

    return undo_all


def in_excepthook(owner: Any, listener: Listener, *, is_before: bool = True) -> Callable[[], None]:
    """Call ``listener`` with what the ``excepthook`` of ``owner`` shows, before or after it; return its undo.

    ``owner`` is the module ``sys`` or ``threading``. A hook that another has set since is kept.
    """
    shown, is_on = owner.excepthook, True

    def show(*args: Any) -> None:
        _, error, trace, *_ = args if owner is sys else args[0]
        if not is_before:
            shown(*args)
        if is_on and isinstance(error, BaseException):
            listener(error if error.__traceback__ is not None else error.with_traceback(trace))
        if is_before:
            shown(*args)

    def undo() -> None:
        nonlocal is_on
        is_on = False
        if owner.excepthook is show:
            owner.excepthook = shown

    owner.excepthook = show
    return undo


class _Anchor:
    """Lifetime of the multiprocessing hook, which holds it weakly."""

    def __init__(self, listener: Listener) -> None:
        self.listener: Listener | None = listener


def call_in_multiprocessing(listener: Listener) -> Callable[[], None]:
    """Do the same for multiprocessing alone: processes that this one forks from now on, and this one itself."""
    util: Any = sys.modules.get("multiprocessing.util")
    process: Any = sys.modules.get("multiprocessing.process")
    if util is None or process is None:
        return lambda: None
    anchor = _Anchor(listener)
    util.register_after_fork(anchor, _await_end)
    # A spawned process imports torch before it knows its parent, and runs no fork hooks.
    if process.parent_process() is not None or "--multiprocessing-fork" in sys.orig_argv:
        _await_end(anchor)

    def undo() -> None:
        anchor.listener = None
        for key, kept in list(util._afterfork_registry.items()):
            if kept is anchor:
                util._afterfork_registry.pop(key, None)

    return undo


def _await_end(anchor: _Anchor) -> None:
    """Check, in a process of multiprocessing, the exception in flight when its target has ended."""
    util = sys.modules["multiprocessing.util"]

    def look() -> None:
        error = sys.exc_info()[1]
        # torch.multiprocessing writes an error down and leaves by SystemExit.
        error = error.__context__ if isinstance(error, SystemExit) else error
        if error is not None and anchor.listener is not None:
            anchor.listener(error)

    util.Finalize(None, look, exitpriority=0)
