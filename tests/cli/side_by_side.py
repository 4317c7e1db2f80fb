"""Output, files and exit status of a process, so that two of them can be compared."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from forked import run_forked


@dataclass(frozen=True)
class Outcome:
    """What a process left behind, but for addresses; ``status`` is negative where a signal ended it."""

    stdout: str
    stderr: str
    status: int


_PERSONAL = ("GRADSAN", "LC_", "LANG", "PYTHON", "FORCE_COLOR", "COLUMNS")

Runner = Callable[..., Outcome]


def run_process(
    command: Sequence[str],
    cwd: Path,
    env: Mapping[str, str] | None,
    stdin: str,
    *,
    is_warm: bool = False,
    kind: str | None = None,
) -> Outcome:
    """Run ``python *command``; warm in a child of a process that has imported torch, or is of that ``kind``."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(_PERSONAL)}
    environment = {**inherited, "LC_ALL": "C.UTF-8", "OMP_NUM_THREADS": "1", "NO_COLOR": "1", **(env or {})}
    if is_warm:
        done = run_forked(command, cwd, environment, stdin, kind=kind)
        return Outcome(_comparable(done.stdout), _comparable(done.stderr), done.returncode)
    with interruptible():
        process = subprocess.run(
            [sys.executable, *command],
            cwd=cwd,
            env=environment,
            input=stdin,
            capture_output=True,
            encoding="utf-8",
            timeout=120,
            check=False,
        )
    return Outcome(_comparable(process.stdout), _comparable(process.stderr), process.returncode)


@contextmanager
def interruptible() -> Iterator[None]:
    """Let processes that are started here take SIGINT, also where a shell has put the tests in its background."""
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.SIG_IGN:
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _comparable(text: str) -> str:
    return re.sub(r"0x[0-9a-f]+|(?<=refcount : )\d+", "…", text)
