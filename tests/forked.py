"""Programs and functions run in a process of their own, forked from one that has imported torch (fork_server.py).

For what may hang or leave something behind: process groups, compilers, threads; and for programs run one after another
as ``python`` or ``gradsan run`` would run them, where importing torch anew would be most of the time.
"""

from __future__ import annotations

import functools
import json
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

LIMIT = 120.0
"""Seconds after which a child is killed."""


class ForkedError(AssertionError):
    """A function failed in its process, or did not end in time; the text is its traceback."""


@functools.cache
def server() -> subprocess.Popen[str]:
    """The server of this process; it ends when its stdin does, that is, with this process."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("GRADSAN", "PYTHON"))}
    return subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("fork_server.py"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        encoding="utf-8",
        env={**own, "LC_ALL": "C.UTF-8", "OMP_NUM_THREADS": "1"},
    )


def ask(request: dict[str, Any]) -> int | None:
    process = server()
    assert process.stdin is not None
    assert process.stdout is not None
    print(json.dumps(request), file=process.stdin, flush=True)
    answer = process.stdout.readline()
    assert answer, "the server of forked processes has died"
    return json.loads(answer)["status"]


def run_forked(
    words: Sequence[str], cwd: Path, env: Mapping[str, str] | None = None, stdin: str = "", limit: float = LIMIT
) -> subprocess.CompletedProcess[str]:
    """Run ``python *words`` (a script, ``-m module`` or ``-c text``) with torch imported already.

    Raises ``subprocess.TimeoutExpired`` past the limit.
    """
    with tempfile.TemporaryDirectory() as folder:
        streams = {name: Path(folder, name) for name in ("stdin", "stdout", "stderr")}
        streams["stdin"].write_text(stdin, encoding="utf-8")
        request = {name: str(path) for name, path in streams.items()}
        environment = dict(os.environ if env is None else env)
        status = ask({**request, "words": list(words), "cwd": str(cwd), "env": environment, "limit": limit})
        texts = [streams[name].read_text(encoding="utf-8") for name in ("stdout", "stderr")]
    if status is None:
        raise subprocess.TimeoutExpired(list(words), limit, *texts)
    return subprocess.CompletedProcess(list(words), status, *texts)


def call_forked(function: Callable[..., Any], *arguments: Any, limit: float = LIMIT) -> Any:
    """Call a function of a module, by its name, in a process of its own; what goes in and out is pickled."""
    with tempfile.TemporaryDirectory() as folder:
        files = {name: str(Path(folder, name)) for name in ("stdin", "stdout", "stderr", "arguments", "answer")}
        Path(files["stdin"]).touch()
        Path(files["arguments"]).write_bytes(pickle.dumps(arguments))
        named = {"module": function.__module__, "function": function.__name__, "path": sys.path}
        ask({**files, **named, "cwd": str(Path.cwd()), "env": dict(os.environ), "limit": limit})
        answer = Path(files["answer"])
        if not answer.exists():
            said = "".join(Path(files[name]).read_text(encoding="utf-8") for name in ("stdout", "stderr"))
            raise ForkedError(f"no answer within {limit:g} s\n{said}")
        is_right, value = pickle.loads(answer.read_bytes())
    if not is_right:
        raise ForkedError(value)
    return value
