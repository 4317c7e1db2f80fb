"""Programs and functions run in a process of their own, forked from one that has imported torch (fork_server.py).

For what may hang or leave something behind: process groups, compilers, threads; and for programs run one after another
as ``python`` or ``gradsan run`` would run them, where importing torch anew would be most of the time.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import pickle
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from warm_client import kind_of

COMMANDS = {
    "python": [],
    "gradsan": ["-m", "gradsan"],
    "torchrun": ["-m", "torch.distributed.run"],
    "pytest": ["-m", "pytest"],
}
"""What runs in forks of a warm process, and the first words of each."""
_PYTHON = sys.executable
"""That of this process; tests let ``sys.executable`` be another one."""
SHARED_SERVER = "PYTEST_FORK_SERVER"
"""Names the server that all workers of a test run share (conftest.py starts it)."""
LIMIT = 120.0
"""Seconds after which a child is killed."""


class ForkedError(AssertionError):
    """A function failed in its process, or did not end in time; the text is its traceback."""


def start_server() -> str:
    """Start a server that lasts as long as this process; what its sockets' names begin with."""
    folder = Path(tempfile.mkdtemp(prefix="forks"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    own = {name: value for name, value in os.environ.items() if not name.startswith(("GRADSAN", "PYTHON"))}
    process = subprocess.Popen(
        [_PYTHON, str(Path(__file__).with_name("fork_server.py")), str(folder / "socket")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        encoding="utf-8",
        # As processes of a search for fixes have it.
        env={**own, "LC_ALL": "C.UTF-8", "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "PYTHONHASHSEED": "0"},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    _SERVERS.append(process)
    return str(folder / "socket")


_SERVERS: list[subprocess.Popen[str]] = []
"""The stdin of a server ends with the last reference to it."""


@functools.cache
def server() -> str:
    """The sockets of the server that all workers of this run share, or else of this process's own."""
    return os.environ.get(SHARED_SERVER) or start_server()


@functools.cache
def connected(kind: str) -> tuple[TextIO, TextIO]:
    """Where requests to a process of this kind go, and where its answers come from."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(server() + kind)
        connection.sendall((0).to_bytes(4, "big"))
        return connection.makefile("w", encoding="utf-8"), connection.makefile(encoding="utf-8")


def ask(request: dict[str, Any], kind: str) -> int | None:
    requests, answers = connected(kind)
    print(json.dumps(request), file=requests, flush=True)
    answer = answers.readline()
    assert answer, "the server of forked processes has died"
    return json.loads(answer)["status"]


def run_forked(
    words: Sequence[str],
    cwd: Path,
    env: Mapping[str, str] | None = None,
    stdin: str = "",
    limit: float = LIMIT,
    kind: str | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run ``python *words`` (a script, ``-m module`` or ``-c text``) with torch imported already.

    ``kind``: of the process (``fork_server.py``), where not that of the words.

    Raises ``subprocess.TimeoutExpired`` past the limit.
    """
    with tempfile.TemporaryDirectory() as folder:
        streams = {name: Path(folder, name) for name in ("stdin", "stdout", "stderr")}
        streams["stdin"].write_text(stdin, encoding="utf-8")
        environment = dict(os.environ if env is None else env)
        request = {name: str(path) for name, path in streams.items()}
        request |= {"words": list(words), "cwd": str(cwd), "env": environment, "limit": limit}
        status = ask(request, kind_of(words, {}) if kind is None else kind)
        texts = [streams[name].read_text(encoding="utf-8") for name in ("stdout", "stderr")]
    if status is None:
        raise subprocess.TimeoutExpired(list(words), limit, *texts)
    return subprocess.CompletedProcess(list(words), status, *texts)


@functools.cache
def warm_commands() -> Path:
    """A folder with ``COMMANDS`` that run in forks of one warm process; it lasts as long as this process.

    For shells and for programs that start Python: everything of a process's is theirs (``warm_client.py``).
    """
    folder = Path(tempfile.mkdtemp(prefix="warm"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for name, first in COMMANDS.items():
        command = folder / name
        command.write_text(
            f"#!{_PYTHON} -ISE\nimport sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\n"
            "from warm_client import run\n"
            f"sys.exit(run({_PYTHON!r}, {server()!r}, {first!r} + sys.argv[1:]))\n",
            encoding="utf-8",
        )
        command.chmod(0o700)
    return folder


def warm_python() -> tuple[str, dict[str, str]]:
    """The ``python`` of :func:`warm_commands`, and the environment with which it stays the program's for its children.

    Where it cannot be had (no Linux), that of this process.
    """
    if not hasattr(os, "pidfd_open"):
        return _PYTHON, {}
    python = str(warm_commands() / "python")
    return python, {"WARM_PYTHON": python}


def call_forked(function: Callable[..., Any], *arguments: Any, limit: float = LIMIT, compiles: bool = False) -> Any:
    """Call a function of a module, by its name, in a process of its own; what goes in and out is pickled.

    ``compiles``: the process has torch.compile's machinery imported.
    """
    with tempfile.TemporaryDirectory() as folder:
        files = {name: str(Path(folder, name)) for name in ("stdin", "stdout", "stderr", "arguments", "answer")}
        Path(files["stdin"]).touch()
        Path(files["arguments"]).write_bytes(pickle.dumps(arguments))
        kind = "compiled functions" if compiles else "functions"
        named = {"module": function.__module__, "function": function.__name__, "path": sys.path}
        ask({**files, **named, "cwd": str(Path.cwd()), "env": dict(os.environ), "limit": limit}, kind)
        answer = Path(files["answer"])
        if not answer.exists():
            said = "".join(Path(files[name]).read_text(encoding="utf-8") for name in ("stdout", "stderr"))
            raise ForkedError(f"no answer within {limit:g} s\n{said}")
        is_right, value = pickle.loads(answer.read_bytes())
    if not is_right:
        raise ForkedError(value)
    return value
