"""A process that has imported torch and forks a child for each program or function that a test sends it.

Importing torch takes seconds of CPU; a fork takes milliseconds. The server runs no tensor operation itself, so that a
child begins as a fresh process does: no thread of a pool, no graph. Requests and answers are lines of JSON on stdin
and stdout; ``forked.py`` is the other side. Given the path of a socket, it forks a program for each connection, with
the file descriptors of the process that asked (``warm_client.py``), several side by side.

A program finds no more than a fresh process would. Functions and commands of gradsan's are forked from processes which
are themselves forks of the first and have imported more (``IMPORTS``).
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
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

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
"""Of the server for programs that import no torch, or one of their own: what ``gradsan run`` has imported when the
program starts, and what it imports for a report, too."""
EVERYWHERE = ("gradsan._session", "gradsan.diagnose", "gradsan.repair.fixes")
"""What processes of a kind would each import anew; a kind is one or two of these words."""


def serve(requests: TextIO, answers: TextIO, kind: str = "") -> dict[str, Any] | None:
    """Answer requests until they end; in a child, return the request that it is to carry out.

    Requests of another kind are answered by a fork that is kept for them: what it imports stays with it.
    """
    kept: dict[str, socket.socket] = {}
    with requests, answers:
        for line in requests:
            request = json.loads(line)
            asked = request["kind"]
            if asked != kind:
                if asked not in kept:
                    kept[asked], other = socket.socketpair()
                    if os.fork() == 0:
                        for one in (requests, answers, *kept.values()):
                            one.close()
                        import_for(asked)
                        return serve(other.makefile(encoding="utf-8"), other.makefile("w", encoding="utf-8"), asked)
                    other.close()
                kept[asked].sendall(line.encode())
                print(answer_of(kept[asked]), file=answers, flush=True)
                continue
            if "function" in request:
                sys.path[:] = request["path"]
                importlib.import_module(request["module"])
            child = os.fork()
            if child == 0:
                break
            status = ended(child, request["limit"])
            print(json.dumps({"status": status}), file=answers, flush=True)
        else:
            return None
    for one in kept.values():
        one.close()
    return request


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


def answer_of(connection: socket.socket) -> str:
    """A line, without its end."""
    with connection.makefile(encoding="utf-8") as answers:
        return answers.readline().rstrip("\n")


def serve_connections(path: str) -> dict[str, Any] | None:
    """Answer connections until stdin ends; in the process of a program, return the request for it."""
    listeners = {kind: listening(f"{path}{kind}") for kind in KINDS}
    own = next((kind for kind in KINDS if kind and os.fork() == 0), "")
    for kind, other in listeners.items():
        if kind != own:
            other.close()
    if not own:
        print("ready", flush=True)
    is_ready = not own
    with listeners[own] as listener:
        while True:
            ready, _, _ = select.select([listener, 0], [], [])
            if listener not in ready:
                return None
            connection, _ = listener.accept()
            if not is_ready:
                import_for(own)
                is_ready = True
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            if os.fork() == 0:
                listener.close()
                return _begin_program(connection)
            connection.close()


def listening(path: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(64)
    return listener


def _begin_program(connection: socket.socket) -> dict[str, Any]:
    """Fork the program, and return in it; the process in between waits for it, and ends it where nobody else waits."""
    size, received, _, _ = socket.recv_fds(connection, 4, 250)
    data = b""
    while len(data) < int.from_bytes(size, "big"):
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
    is_without_torch = sys.argv[1:] == ["without torch"]
    if not is_without_torch:
        # For the children. The first optimizer of a process imports torch._dynamo, which takes as long as torch itself.
        import torch._dynamo
        import torch.distributed
        import torch.utils.checkpoint  # noqa: F401

        end_without_libraries()
    gc.collect()
    gc.freeze()
    wanted = (
        serve_connections(sys.argv[1])
        if sys.argv[1:] and not is_without_torch
        else serve(os.fdopen(os.dup(0), encoding="utf-8"), os.fdopen(os.dup(1), "w", encoding="utf-8"))
    )
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
