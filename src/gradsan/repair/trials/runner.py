"""Runner of trials: forked from a warm server where this system allows it, else fresh processes.

The server (``_server.py``) has imported torch and the installed modules that the program imports at its top; several
trials run side by side where cores are free.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from gradsan.launch.program import Target, prepare
from gradsan.repair.libraries import is_library
from gradsan.repair.trials.preload import Preload
from gradsan.repair.trials.trial import Request, Trial, answered, environment_of_trials, run_trial

_MOST_SIDE_BY_SIDE = 4
_START_SECONDS = 120.0
"""Seconds to wait for a server to import everything."""


class Runner:
    """Runner of the trials of one program; a context manager, which ends the server."""

    def __init__(self, target: Target, *, is_warm: bool = True) -> None:
        """Set up the runner; ``is_warm`` False: every trial in a fresh process."""
        # On macOS the system's own libraries do not survive a fork.
        can_fork = sys.platform == "linux" and hasattr(os, "pidfd_open")
        self._server = _start(target) if is_warm and can_fork else None
        self._number = 0

    def __enter__(self) -> Runner:
        """Return the runner."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the server and its trials."""
        if self._server is not None:
            self._server.stop()

    @property
    def is_warm(self) -> bool:
        """Whether trials are forked from a process that has torch imported."""
        return self._server is not None and self._server.is_ready()

    def run(self, request: Request) -> Trial:
        """Run the program once, in the working directory and environment of this process, with its output captured."""
        return self.run_all([request])[0]

    def run_all(self, requests: Sequence[Request], *, side_by_side: int = 1) -> list[Trial]:
        """Run the program once for each of ``requests``, up to ``side_by_side`` at a time."""
        if self._server is None or not self.is_warm:
            return [run_trial(request) for request in requests]
        # A changed package may have been imported ahead, and so may its importers.
        fresh = {position for position, one in enumerate(requests) if any(map(is_library, one.files))}
        waiting = deque((position, one) for position, one in enumerate(requests) if position not in fresh)
        found = {position: run_trial(requests[position]) for position in fresh}
        with contextlib.ExitStack() as open_trials:
            running: dict[int, _Running] = {}
            while waiting or running:
                while waiting and len(running) < max(1, side_by_side):
                    position, request = waiting.popleft()
                    self._number += 1
                    folder = open_trials.enter_context(tempfile.TemporaryDirectory(prefix="gradsan-fix-"))
                    running[self._number] = _Running(position, request, Path(folder))
                    self._server.start(self._number, running[self._number])
                for number in self._server.ended(running):
                    one = running.pop(number)
                    found[one.position] = one.trial()
                if self._server.is_gone:
                    # Its running trials are run again.
                    rest = [(one.position, one.request) for one in running.values()]
                    found.update((position, run_trial(request)) for position, request in (*rest, *waiting))
                    break
        return [found[position] for position in range(len(requests))]


def cores_for_trials() -> int:
    """The number of trials that may run side by side on this machine."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(count, _MOST_SIDE_BY_SIDE))


class _Running:
    """A started trial."""

    def __init__(self, position: int, request: Request, folder: Path) -> None:
        self.position = position
        self.request = replace(request, result=str(folder / "result"))
        self.asked = folder / "request"
        self.streams = folder / "output", folder / "errors"
        self.asked.write_bytes(pickle.dumps(self.request))
        for stream in self.streams:
            stream.touch()
        self.ends_at = time.monotonic() + request.timeout
        self.pid: int | None = None
        self.status: int | None = None
        self.was_stopped = False

    def stop(self) -> None:
        """Kill it and the processes that it started."""
        self.was_stopped = True
        if self.pid is not None:
            with contextlib.suppress(OSError):
                os.killpg(self.pid, signal.SIGKILL)

    def trial(self) -> Trial:
        """The result as a Trial."""
        if self.pid is not None:
            # Workers that the program left behind.
            with contextlib.suppress(OSError):
                os.killpg(self.pid, signal.SIGKILL)
        printed, complaints = (stream.read_bytes().decode("utf-8", "replace") for stream in self.streams)
        return answered(None if self.was_stopped else self.status, printed, complaints, Path(self.request.result))


class _Server:
    """Client side of a server."""

    def __init__(self, process: subprocess.Popen[bytes], channel: socket.socket) -> None:
        self._process, self._channel = process, channel
        self._waiting = b""
        self._is_ready: bool | None = None
        self.is_gone = False

    def is_ready(self) -> bool:
        """Whether it can fork trials; waits until that is known."""
        ends_at = time.monotonic() + _START_SECONDS
        while self._is_ready is None and not self.is_gone and time.monotonic() < ends_at:
            for message in self._messages(ends_at - time.monotonic()):
                self._is_ready = message["ready"]
        return bool(self._is_ready) and not self.is_gone

    def start(self, number: int, trial: _Running) -> None:
        asked = {"id": number, "request": str(trial.asked), "streams": [str(stream) for stream in trial.streams]}
        try:
            self._channel.sendall(json.dumps(asked).encode() + b"\n")
        except OSError:
            self.is_gone = True

    def ended(self, running: dict[int, _Running]) -> list[int]:
        """The numbers of the trials that ended, after waiting for one or for a timeout."""
        wait = max(0.0, min(one.ends_at for one in running.values()) - time.monotonic())
        ended: list[int] = []
        for message in self._messages(wait):
            trial = running.get(message["id"])
            if trial is None:
                continue
            if "pid" in message:
                trial.pid = message["pid"]
            else:
                trial.status = message["status"]
                ended.append(message["id"])
        for trial in running.values():
            if time.monotonic() >= trial.ends_at and not trial.was_stopped:
                trial.stop()
                trial.ends_at = time.monotonic() + _START_SECONDS
        return ended

    def _messages(self, seconds: float) -> list[dict[str, Any]]:
        self._channel.settimeout(max(0.001, seconds))
        try:
            data = self._channel.recv(65536)
        except TimeoutError:
            return []
        except OSError:
            data = b""
        if not data:
            self.is_gone = True
        *lines, self._waiting = (self._waiting + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def stop(self) -> None:
        self._channel.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _start(target: Target) -> _Server | None:
    launch = prepare(target)
    path = [] if launch.path_entry is None else [launch.path_entry]
    preload = Preload()
    sys.path[:0] = path
    try:
        file = launch.variables.get("__file__") or _module_file(target)
        if file is not None:
            preload.read(file)
    finally:
        del sys.path[: len(path)]
    if not preload.is_known:
        return None
    ours, its = socket.socketpair()
    with its:
        process = subprocess.Popen(
            [sys.executable, "-m", "gradsan.repair.trials._server", str(its.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[its.fileno()],
            env={**environment_of_trials(), **preload.environment},
        )
    with contextlib.suppress(OSError):
        modules = [*preload.modules, *(["torch._dynamo"] if preload.has_optimizers else [])]
        ours.sendall(json.dumps({"path": path, "modules": modules}).encode() + b"\n")
    return _Server(process, ours)


def _module_file(target: Target) -> str | None:
    if target.kind != "module":
        return None
    import importlib.util

    with contextlib.suppress(ImportError, ValueError):
        spec = importlib.util.find_spec(target.name)
        return None if spec is None else spec.origin
    return None
