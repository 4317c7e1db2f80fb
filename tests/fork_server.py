"""Processes that have imported torch, and fork a child for each program or function that a test asks for.

Importing torch takes seconds of CPU; a fork takes milliseconds. No server runs a tensor operation itself, so that a
child begins as a fresh process does: no thread of a pool, no graph. One tree of processes serves all workers of a test
run: the first imports torch when that is asked for, and the others are its forks, one for each of ``KINDS``, which have
imported more (``IMPORTS``). Each listens at a socket of its own. What connects is a test (``forked.py``), which sends
requests one after another as lines of JSON, or the stand-in for a program (``warm_client.py``), with its file
descriptors. Either gets a fork of its own.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import fcntl
import gc
import importlib
import json
import os
import pickle
import runpy
import select
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import weakref
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

from warm_client import KINDS

POLL_SECONDS = 0.003
EXIT = os._exit
"""A program may be given another."""
IMPORTS = {
    "functions": ("gradsan._watching",),
    "commands": ("gradsan._watching", "gradsan.cli.run", "gradsan.present.json", "gradsan.present.terminal"),
    "compiled": ("torch._inductor.compile_fx", "torch._inductor.codegen.cpp", "torch._dynamo.backends.inductor"),
}
WITHOUT_TORCH = {
    "started": ("gradsan.cli.run",),
    "reporting": ("gradsan.cli.run", "gradsan.present.json", "gradsan.present.terminal", "gradsan.repair.fixes"),
}
"""For programs that import no torch, or one of their own: what ``gradsan run`` has imported when the program starts,
and what it imports for a report, too."""
EVERYWHERE = ("gradsan._session", "gradsan.diagnose", "gradsan.repair.fixes")
"""What processes of a kind would each import anew; a kind is one or two of these words."""


def serve_kinds(path: str) -> dict[str, Any] | None:
    """Serve all kinds until stdin ends; in a child, return the request that it is to carry out."""
    listeners = {kind: listening(f"{path}{kind}") for kind in KINDS}
    print("ready", flush=True)
    own = _forked_for(WITHOUT_TORCH)
    if not own:
        ready, _, _ = select.select([0, *(one for kind, one in listeners.items() if kind not in WITHOUT_TORCH)], [], [])
        if 0 in ready:
            return None
        import_torch()
        own = _forked_for(kind for kind in KINDS if kind and kind not in WITHOUT_TORCH)
    for kind, other in listeners.items():
        if kind != own:
            other.close()
    return serve_kind(own, listeners[own])


def _forked_for(kinds: Iterable[str]) -> str:
    """Fork a process for each of ``kinds``; its kind there, nothing in this one."""
    return next((kind for kind in kinds if os.fork() == 0), "")


def serve_kind(kind: str, listener: socket.socket) -> dict[str, Any] | None:
    """Fork for each connection, until stdin ends; in a fork, or a child of it, return the request to carry out."""
    is_ready = not kind
    with listener:
        while True:
            ready, _, _ = select.select([listener, 0], [], [])
            if listener not in ready:
                return None
            connection, _ = listener.accept()
            if not is_ready:
                import_for(kind)
                is_ready = True
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            if os.fork() == 0:
                break
            connection.close()
    size, received, _, _ = socket.recv_fds(connection, 4, 250)
    length = int.from_bytes(size, "big")
    return begin_program(connection, length, received) if length else serve_requests(connection)


def serve_requests(connection: socket.socket) -> dict[str, Any] | None:
    """Answer requests one after another until they end; in a child, return the request that it is to carry out."""
    with (
        connection,
        connection.makefile(encoding="utf-8") as requests,
        connection.makefile("w", encoding="utf-8") as answers,
    ):
        for line in requests:
            request: dict[str, Any] = json.loads(line)
            if "function" in request:
                sys.path[:] = request["path"]
                importlib.import_module(request["module"])
            child = os.fork()
            if child == 0:
                return request
            print(json.dumps({"status": ended(child, request["limit"])}), file=answers, flush=True)
    return None


def import_torch() -> None:
    """The first optimizer of a process imports torch._dynamo, which takes as long as torch itself."""
    for name in ("torch._dynamo", "torch.distributed", "torch.utils.checkpoint"):
        importlib.import_module(name)
    end_without_libraries()
    gc.collect()
    gc.freeze()


def import_for(kind: str) -> None:
    """What each process of this kind would import and read anew."""
    for name in WITHOUT_TORCH.get(kind, ()):
        importlib.import_module(name)
    if kind in WITHOUT_TORCH:
        gc.collect()
        gc.freeze()
        return
    for name in (*EVERYWHERE, *(name for word in kind.split() for name in IMPORTS[word])):
        importlib.import_module(name)
    recorder = importlib.import_module("gradsan.record.recorder").recorder()
    recorder._plan = importlib.import_module("gradsan.record.writes").plan(recorder.core)
    importlib.import_module("gradsan.text._messages").sentences("en")
    # A fresh process has no compiler whose frames there are; here torch._dynamo is imported already.
    importlib.import_module("gradsan.record.compilers").leave_own_frames()
    gc.collect()
    gc.freeze()


def end_without_libraries() -> None:
    """Do not take torch's operator libraries apart at the end of each child, which takes as long as a small program."""
    for finalizer in list(weakref.finalize._registry):
        function = finalizer.peek()[1]
        if function.__module__ == "torch.library":
            finalizer.atexit = False


def listening(path: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(64)
    return listener


def begin_program(connection: socket.socket, length: int, received: list[int]) -> dict[str, Any]:
    """Fork the program, and return in it; the process in between waits for it, and ends it where nobody else waits."""
    data = b""
    while len(data) < length:
        data += connection.recv(65536)
    child = os.fork()
    if child:
        for number in received:
            os.close(number)
        handle = os.pidfd_open(child)
        ready, _, _ = select.select([connection, handle], [], [])
        if handle not in ready:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        with contextlib.suppress(OSError):
            connection.sendall(str(status).encode())
        os._exit(0)
    connection.close()
    request: dict[str, Any] = json.loads(data)
    # First out of the way of the numbers that they are to have.
    moved = [fcntl.fcntl(number, fcntl.F_DUPFD, 1_000) for number in received]
    for number in received:
        os.close(number)
    for number, opened in zip(request["numbers"], moved, strict=True):
        os.dup2(opened, number)
        os.close(opened)
    return request


def ended(child: int, limit: float) -> int | None:
    """The exit status of a child, negative for a signal; None where it ran past the limit and was killed."""
    deadline = time.monotonic() + limit
    status = None
    while time.monotonic() < deadline and status is None:
        found, wait_status = os.waitpid(child, os.WNOHANG)
        if found:
            status = os.waitstatus_to_exitcode(wait_status)
        else:
            time.sleep(POLL_SECONDS)
    # What the child started goes with it.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)
    if status is None:
        os.waitpid(child, 0)
    return status


def settle(request: dict[str, Any]) -> None:
    """Make this child what a process started by the request would be: session, streams, folder, environment."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, name in enumerate(("stdin", "stdout", "stderr") if "stdin" in request else ()):
        flags = os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT | os.O_APPEND
        opened = os.open(request[name], flags, 0o600)
        os.dup2(opened, number)
        os.close(opened)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    # What a fresh interpreter reads from its environment.
    sys.dont_write_bytecode = bool(request["env"].get("PYTHONDONTWRITEBYTECODE"))
    tempfile.tempdir = None
    if request["env"].get("GRADSAN_NATIVE") == "0" and "gradsan.record.recorder" in sys.modules:
        sys.modules["gradsan.record.recorder"]._recorder = None
    # A stand-in for the interpreter (warm_client.py), for what the program starts.
    sys.executable = request["env"].get("WARM_PYTHON", sys.executable)
    if request["env"].get("PYTHONUNBUFFERED"):
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(line_buffering=True)
    if not getattr(sys.flags, "safe_path", False) and "words" in request:  # new in Python 3.11
        extra = [one for one in request["env"].get("PYTHONPATH", "").split(os.pathsep) if one]
        sys.path[1:1] = extra


def run_words(words: list[str]) -> None:
    """Do what ``python *words`` does: a script, ``-m module`` or ``-c text``."""
    if words[0] == "-m":
        sys.argv[:] = ["-m", *words[2:]]
        sys.path[0] = str(Path.cwd())
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif words[0] == "-c":
        sys.argv[:] = ["-c", *words[2:]]
        sys.path[0] = ""
        exec(compile(words[1], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv[:] = words
        sys.path[0] = str(Path(words[0]).resolve().parent)
        runpy.run_path(words[0], run_name="__main__")


def leave(code: object) -> None:
    """End as the interpreter does, but for taking all modules apart, which takes longer than most programs here.

    Returns where the interpreter itself has something to say at the end.
    """
    if code is not None and not isinstance(code, int):
        return
    threading._shutdown()
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except Exception:
        return
    EXIT(0 if code is None else code & 0xFF)


def of_program(shown: TracebackType | None) -> TracebackType | None:
    """The traceback as a fresh interpreter has it: without what started the program here."""
    own = (__file__, runpy.__file__, f"<frozen {runpy.__name__}>")
    while shown is not None and shown.tb_next is not None and shown.tb_frame.f_code.co_filename in own:
        shown = shown.tb_next
    return shown


def run_function(request: dict[str, Any]) -> None:
    """Call a function and leave what it returned, or its traceback, in a file; end without any of Python's clean-up."""
    faulthandler.dump_traceback_later(request["limit"] - 1, exit=True)
    function = getattr(sys.modules[request["module"]], request["function"])
    try:
        answer = (True, function(*pickle.loads(Path(request["arguments"]).read_bytes())))
    except BaseException:
        answer = (False, traceback.format_exc())
    Path(request["answer"]).write_bytes(pickle.dumps(answer))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    wanted = serve_kinds(sys.argv[1])
    if wanted is not None:
        settle(wanted)
        if "function" in wanted:
            run_function(wanted)
        try:
            run_words(wanted["words"])
            leave(0)
        except KeyboardInterrupt:
            raise
        except SystemExit as end:
            leave(end.code)
            raise
        except BaseException as failure:
            failure.__traceback__ = of_program(failure.__traceback__)
            sys.excepthook(type(failure), failure, failure.__traceback__)
            leave(1)
            sys.exit(1)
