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

from gradsan.launch.sentences import write_to_stderr

_OWN_FILES = str(Path(__file__).resolve().parent.parent)
_IMPORT_MACHINERY = "<frozen importlib"
_listeners: list[Callable[[BaseException], None]] = []


def call_when_uncaught(listener: Callable[[BaseException], None]) -> None:
    """Have ``listener`` told of every exception that ends the program or a thread, before it is shown.

    It must not raise.
    """
    _listeners.append(listener)


def show_uncaught(failure: BaseException) -> int:
    """Hand ``failure``, without gradsan's frames, to ``sys.excepthook``; the exit status that python would end with."""
    _tell(failure)
    remove_own_frames(failure)
    trace = failure.__traceback__
    sys.last_type, sys.last_value, sys.last_traceback = type(failure), failure, trace
    if sys.version_info >= (3, 12):
        sys.last_exc = failure
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
    """The status that ``leaving`` asks for; what is no number is printed on stderr and means 1."""
    code = leaving.code
    if code is None:
        return 0
    if isinstance(code, int):
        return int(code)
    with contextlib.suppress(Exception):
        print(code, file=sys.stderr)
    return 1


def clean_tracebacks_of_threads() -> None:
    """Let exceptions that end a thread be shown without gradsan's frames, too, unless the program has its own way."""
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
    """Wait, as python does when the main program has ended, for the threads that are no daemons.

    Calling what the interpreter calls is the only way that also lets pools of threads end; a second call does nothing.
    True where ``SIGTERM`` came meanwhile, which ends the waiting and is yet to end the process: threads that wait for
    each other must not keep the report.
    """
    came: list[int] = []
    try:
        with _ended_by_sigterm(came):
            threading._shutdown()  # type: ignore[attr-defined]
    except _TerminatedError:
        return True
    except BaseException as failure:
        remove_own_frames(failure)
        lines = "".join(traceback.format_tb(failure.__traceback__))
        words = f"{type(failure).__name__}: {failure}"
        write_to_stderr(f"Exception ignored in: {threading!r}\nTraceback (most recent call last):\n{lines}{words}\n")
    return bool(came)


class _TerminatedError(BaseException):
    """``SIGTERM`` came."""


@contextlib.contextmanager
def _ended_by_sigterm(came: list[int]) -> Iterator[None]:
    """Raise :class:`_TerminatedError` where ``SIGTERM`` would end the process at once, and note it in ``came``."""
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    process = os.getpid()

    def end(number: int, _: Any) -> None:
        signal.signal(number, signal.SIG_DFL)
        if os.getpid() != process:
            # A child that one of the threads has forked.
            signal.raise_signal(number)
        came.append(number)
        raise _TerminatedError

    show = sys.unraisablehook

    def show_others(args: Any) -> None:
        # Since 3.13 the interpreter shows what ends its waiting, and goes on.
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
    """Run what the program has registered with ``atexit``, as python does after its threads; twice is as good as once.

    multiprocessing waits there for the children that it has started.
    """
    show = sys.unraisablehook

    def show_cleaned(args: Any) -> None:
        trace = _without_own_frames(args.exc_traceback)
        show(type(args)((args.exc_type, args.exc_value, trace, args.err_msg, args.object)))

    # What a builtin raises has the frame of whoever runs the handlers.
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
    """Take gradsan's frames out of the tracebacks of ``failure``, its causes, contexts and members."""
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
            # The import system removes its frames itself, but not those in front of our hook on the import of torch.
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
