"""Stand-in for the Python interpreter in tests: the program runs in a fork of a process that has torch imported.

It takes the place of ``python``, and of a command such as ``gradsan`` whose module is then the first argument. What a
fork cannot be exact about runs in a real interpreter: options of Python's own, and what an environment variable of
gradsan's changes at the start. Only small modules are imported (no pathlib): this is to start in milliseconds.
"""

import json
import os
import socket
from collections.abc import Mapping, Sequence

RUN_FORKED = ("-m", "-c")
READ_AT_THE_START = ("GRADSAN", "GRADSAN_OPTIONS")
KINDS = ("", "functions", "compiled functions", "commands", "compiled commands", "started", "reporting")
"""Of processes that fork; each has a socket of its own, and has more imported (``fork_server.py``)."""


def run(python: str, server: str, words: list[str]) -> int:
    """The exit status of ``python *words``; file descriptors, folder and environment are this process's."""
    if words[:1] == ["-u"]:
        # For all that Python starts from here on, too; torchrun says it to each rank.
        os.environ["PYTHONUNBUFFERED"] = "1"
        words = words[1:]
    is_plain = bool(words) and (words[0] in RUN_FORKED or not words[0].startswith("-"))
    if not is_plain or any(name in os.environ for name in READ_AT_THE_START):
        os.execv(python, [python, *words])
    numbers = [number for number in map(int, os.listdir("/proc/self/fd")) if is_open(number)]  # noqa: PTH208
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(server + kind_of(words, os.environ))
        request = {"words": words, "cwd": os.getcwd(), "env": dict(os.environ), "numbers": numbers}  # noqa: PTH109
        data = json.dumps(request).encode()
        socket.send_fds(connection, [len(data).to_bytes(4, "big")], numbers)
        connection.sendall(data)
        # The other side of a pipe sees its end when the program ends.
        for number in numbers:
            os.close(number)
        answer = connection.recv(64)
    status = int(answer or b"1")
    if status < 0:
        os.kill(os.getpid(), -status)
    return status


def kind_of(words: Sequence[str], environment: Mapping[str, str]) -> str:
    """Commands of gradsan's are of a kind of their own, which ``WARM_KIND`` may choose."""
    is_command = words[0] == "-m" and words[1].partition(".")[0] == "gradsan"
    return environment.get("WARM_KIND", "commands") if is_command else ""


def is_open(number: int) -> bool:
    """Whether a descriptor is still open: that of the listing itself is not."""
    try:
        os.fstat(number)
    except OSError:
        return False
    return True
