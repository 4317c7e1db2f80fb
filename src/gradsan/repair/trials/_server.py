"""Server with torch imported that forks a child for each trial: ``python -m gradsan.repair.trials._server FD``.

It communicates with :mod:`gradsan.repair.trials.runner` over a socket in lines of JSON. It runs nothing of the
program, and no torch operator that could initialize a device, which would not survive a fork.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import pickle
import pkgutil
import selectors
import signal
import socket
import sys
import threading
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

_PACKAGES_THAT_ARE_THERE = ("gradsan._session", "gradsan.record.recorder", "gradsan.diagnose", "gradsan.repair.fixes")
_OWN = (
    "gradsan.repair.trials._child",
    "gradsan.repair.trials.recording",
    "gradsan.repair.trials.allowances",
    "gradsan.repair.trials.cost",
)


def main() -> None:
    """Import, report it, and serve until the peer has closed."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    asked = json.loads(_line(channel))
    own = list(sys.path)
    # As in the program: without the directory that `python -m` prepends.
    sys.path[:] = [*asked["path"], *own[1:]]
    _import_ahead(asked["modules"])
    sys.path[:] = own
    is_ready = threading.active_count() == 1 and not _device_is_awake() and not _has_modules_from(asked["path"])
    _send(channel, {"ready": is_ready})
    if is_ready:
        _Server(channel).serve()


class _Server:
    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._selector = selectors.DefaultSelector()
        self._selector.register(channel, selectors.EVENT_READ)
        self._running: dict[int, int] = {}
        self._waiting = b""

    def serve(self) -> None:
        gc.collect()
        # Existing objects are frozen: the garbage collector of each child would copy their pages.
        gc.freeze()
        while True:
            for key, _ in self._selector.select():
                if key.data is not None:
                    self._reap(key.fd, key.data)
                elif not self._hear():
                    self._end_all()
                    return

    def _hear(self) -> bool:
        data = self._channel.recv(65536)
        *lines, self._waiting = (self._waiting + data).split(b"\n")
        for line in lines:
            self._start(json.loads(line))
        return bool(data)

    def _start(self, asked: dict[str, Any]) -> None:
        pid = os.fork()
        if pid == 0:
            self._become(asked)
        handle = os.pidfd_open(pid)
        self._running[handle] = pid
        self._selector.register(handle, selectors.EVENT_READ, asked["id"])
        _send(self._channel, {"id": asked["id"], "pid": pid})

    def _become(self, asked: dict[str, Any]) -> None:
        """Turn into the child: a session of its own, no input, output to the requested files."""
        status = 1
        try:
            os.setsid()
            self._selector.close()
            self._channel.close()
            for handle in self._running:
                os.close(handle)
            _redirect(*asked["streams"])
            from gradsan.repair.trials._child import run_request

            status, _ = run_request(pickle.loads(Path(asked["request"]).read_bytes()))
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(Exception):
                    stream.flush()
            os._exit(status)

    def _reap(self, handle: int, number: int) -> None:
        _, status = os.waitpid(self._running.pop(handle), 0)
        self._selector.unregister(handle)
        os.close(handle)
        _send(self._channel, {"id": number, "status": os.waitstatus_to_exitcode(status)})

    def _end_all(self) -> None:
        for pid in self._running.values():
            with contextlib.suppress(OSError):
                os.killpg(pid, signal.SIGKILL)


def _redirect(output: str, errors: str) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    for number, handle in enumerate(
        (os.open(os.devnull, os.O_RDONLY), os.open(output, flags, 0o600), os.open(errors, flags, 0o600))
    ):
        os.dup2(handle, number)
        os.close(handle)


def _import_ahead(modules: Iterable[str]) -> None:
    """Import "module" and "module:name"; one that fails to import here fails in the program."""
    with warnings.catch_warnings():
        # The program must see its own warnings.
        warnings.simplefilter("ignore")
        for name in (*modules, "torch"):
            with contextlib.suppress(BaseException):
                _import(name)
        if "torch" in sys.modules:
            for name in (*_PACKAGES_THAT_ARE_THERE, *_OWN):
                importlib.import_module(name)
            from gradsan import source
            from gradsan.repair.trials.held_functions import look_for_holders

            # Their names are resolved on demand, which each child would repeat.
            for module in pkgutil.walk_packages(source.__path__, f"{source.__name__}."):
                importlib.import_module(module.name)
            look_for_holders()
            _watch_once()


def _import(name: str) -> None:
    module, _, member = name.partition(":")
    loaded = importlib.import_module(module)
    if member and not hasattr(loaded, member):
        importlib.import_module(f"{module}.{member}")


def _watch_once() -> None:
    """Read everything that watching needs from torch (schemas, tables) once, before the first fork."""
    if _has_devices():
        return
    from gradsan._session import Session

    session = Session(mode="watch")
    session.start()
    session.stop()


def _has_devices() -> bool:
    # Asking torch could initialize the driver.
    import torch

    builds = (getattr(torch.version, name, None) for name in ("cuda", "hip", "xpu"))
    drivers = ("/dev/nvidiactl", "/dev/kfd", "/dev/dri", "/dev/dxg")
    return any(builds) and any(Path(one).exists() for one in drivers)


def _device_is_awake() -> bool:
    torch = sys.modules.get("torch")
    if torch is None:
        return True
    return any(
        kind is not None and kind.is_initialized()
        for kind in (getattr(torch, "cuda", None), getattr(torch, "xpu", None))
        if hasattr(kind, "is_initialized")
    )


def _has_modules_from(folders: Iterable[str]) -> bool:
    """Whether a file in ``folders``, the program's own, shadowed an installed module and was imported."""
    from gradsan.repair.libraries import imported_files, own_files

    own = tuple(os.path.join(os.path.realpath(folder), "") for folder in folders)  # noqa: PTH118
    # Results found here are not computed again in every child.
    return any(path.startswith(own) for path in own_files(imported_files()))


def _line(channel: socket.socket) -> bytes:
    data = b""
    while not data.endswith(b"\n"):
        more = channel.recv(65536)
        if not more:
            sys.exit(0)
        data += more
    return data


def _send(channel: socket.socket, message: dict[str, Any]) -> None:
    # The peer may have gone; reading from it will show it.
    with contextlib.suppress(OSError):
        channel.sendall(json.dumps(message).encode() + b"\n")


if __name__ == "__main__":
    main()
