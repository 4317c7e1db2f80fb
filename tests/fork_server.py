"""A process that has imported torch and forks a child for each program or function that a test sends it.

Importing torch takes seconds of CPU; a fork takes milliseconds. The server runs no tensor operation itself, so that a
child begins as a fresh process does: no thread of a pool, no graph. Requests and answers are lines of JSON on stdin
and stdout; ``forked.py`` is the other side.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import json
import os
import pickle
import runpy
import signal
import sys
import time
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any

POLL_SECONDS = 0.003


def serve() -> dict[str, Any] | None:
    """Answer requests until stdin ends; in a child, return the request that it is to carry out."""
    with os.fdopen(os.dup(0), encoding="utf-8") as requests, os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        for line in requests:
            request = json.loads(line)
            # A function's module is imported once, here; programs find only what a fresh process would.
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
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        flags = os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT | os.O_APPEND
        opened = os.open(request[name], flags, 0o600)
        os.dup2(opened, number)
        os.close(opened)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    # What a fresh interpreter reads from its environment.
    sys.dont_write_bytecode = bool(request["env"].get("PYTHONDONTWRITEBYTECODE"))
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
    import torch.distributed
    import torch.utils.checkpoint  # noqa: F401 - for the children

    gc.collect()
    gc.freeze()
    wanted = serve()
    if wanted is not None:
        settle(wanted)
        if "function" in wanted:
            run_function(wanted)
        try:
            run_words(wanted["words"])
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as failure:
            failure.__traceback__ = of_program(failure.__traceback__)
            sys.excepthook(type(failure), failure, failure.__traceback__)
            sys.exit(1)
