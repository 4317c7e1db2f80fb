"""Two processes with gloo, started as users start them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path

from forked import warm_python

OPENING = """\
import sys, time
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
"""
CLOSING = "dist.destroy_process_group()\n"
_PERSONAL = ("GRADSAN", "LC_", "LANG", "FORCE_COLOR", "COLUMNS", "RANK", "WORLD_SIZE", "MASTER_", "TORCHELASTIC")


@dataclass(frozen=True)
class Job:
    """What a job has left behind; ``reports`` are its JSON files by rank."""

    status: int
    stderr: str
    stdout: str
    seconds: float
    reports: dict[int, dict]

    def codes(self, rank: int) -> list[str]:
        return [one["code"] for one in self.reports[rank]["diagnoses"]]


def own_environment(env: dict | None = None) -> dict[str, str]:
    """The environment of a job: this one, without what is personal."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(_PERSONAL)}
    own = {"LC_ALL": "C.UTF-8", "OMP_NUM_THREADS": "1", "NO_COLOR": "1", "GRADSAN_TEXT": "strict", "GRADSAN_DEBUG": "1"}
    return {**inherited, **own, **(env or {})}


def run_pair(folder: Path, *words: str, timeout: float = 240) -> tuple[subprocess.CompletedProcess, ...]:
    """Run ``python WORDS`` as two ranks, without torchrun, which takes a process of its own; both must end in time.

    Both are forks of a process that has torch imported.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    python, own = warm_python()
    job = {**own, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    started = [
        subprocess.Popen(
            [python, *words],
            cwd=folder,
            env=own_environment({**job, "RANK": str(rank), "LOCAL_RANK": str(rank)}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    ended = []
    try:
        for process in started:
            stdout, stderr = process.communicate(timeout=timeout)
            ended.append(subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr))
    finally:
        for process in started:
            process.kill()
    return tuple(ended)


def run_job(
    folder: Path, body: str, *options: str, torchrun: tuple[str, ...] = ("-m", "gradsan"), is_warm: bool = False
) -> Job:
    """Run ``body`` in two ranks under ``gradsan run --json out.json``; ``torchrun`` is how that is started.

    Warm: both ranks are forks of a process that has torch imported, which get no SIGTERM. Where they are cold, torchrun
    itself is one all the same, unless it is to start a command that is no Python.
    """
    (folder / "main.py").write_text(OPENING + textwrap.dedent(body) + CLOSING, encoding="utf-8")
    python = warm_python()[0] if is_warm else sys.executable
    launcher = sys.executable if "--no-python" in torchrun else warm_python()[0]
    command = [launcher, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *torchrun]
    began = time.monotonic()
    done = subprocess.run(
        [*command, "run", "--json", "out.json", *options, "main.py"],
        cwd=folder,
        env=own_environment({"PYTHON_EXEC": python}),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    seconds = time.monotonic() - began
    files = {int(file.name.split(".")[1].removeprefix("rank")): file for file in folder.glob("out.rank*.json")}
    reports = {rank: json.loads(file.read_text(encoding="utf-8")) for rank, file in files.items()}
    return Job(done.returncode, done.stderr, done.stdout, seconds, reports)
