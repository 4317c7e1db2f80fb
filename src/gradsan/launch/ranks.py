"""Ranks of a job: files for each, each finding reported by one rank, one exit status for the job.

The ranks communicate by the job's own key-value store (``MASTER_ADDR``, ``MASTER_PORT``), which ``torchrun`` keeps as
long as one of them lives, and rank 0 as long as it runs itself if there is no ``torchrun``. Without the store, every
rank reports for itself.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from gradsan.model import Diagnosis, Message, Report
from gradsan.options import REPORT_FILES, STANDARD_OUTPUT, Options

_CONNECT_SECONDS = 2.0
_PATIENCE_SECONDS = 3.0
"""How long ranks wait for rank 0's report, and rank 0, if it has the store, for them to read that."""
_POLL_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Rank:
    """This process's number in its job, from 0 through all nodes, and the job's ``size``, at least 2."""

    number: int
    size: int


def rank_of(environ: Mapping[str, str]) -> Rank | None:
    """Return the rank in ``RANK`` and ``WORLD_SIZE``, as torchrun sets them; None for a single process."""
    try:
        number, size = int(environ["RANK"]), int(environ["WORLD_SIZE"])
    except (KeyError, ValueError):
        return None
    return Rank(number, size) if size > 1 and 0 <= number < size else None


def rank_path(path: str, rank: Rank, process: int) -> str:
    """Return ``path`` with rank and process id before its last suffix: ``out.json`` becomes ``out.rank1.4711.json``."""
    return _with_mark(path, f"rank{rank.number}.{process}")


def own_files(options: Options, rank: Rank | None, directory: Path | None) -> Options:
    """Return ``options`` with files of this rank's own instead of those given for all ranks.

    Existing paths that are no regular files (``/dev/stdout``, a pipe) are kept.
    """
    if rank is None:
        return options
    named = {name: getattr(options, name) for name in (*REPORT_FILES, "write_baseline")}
    own: dict[str, Any] = {
        name: rank_path(path, rank, os.getpid())
        for name, path in named.items()
        if path is not None
        and path != STANDARD_OUTPUT
        and ((at := (directory or Path()) / path).is_file() or not at.exists())
    }
    return replace(options, **own)


def heading(rank: Rank, asked: Options, own: Options) -> Message:
    """Return the sentence before a rank's report: its number, and how to see the reports of all.

    ``asked`` are the original options, ``own`` those returned by :func:`own_files`.
    """
    values = {"rank": rank.number, "size": rank.size}
    if asked.json is None or asked.json == own.json:
        return Message("ranks.heading", values)
    return Message("ranks.heading_with_files", {**values, "pattern": _with_mark(asked.json, "rank*")})


class Board:
    """Shared record of a job's ranks: the findings already reported, and which rank ends last."""

    def __init__(self, rank: Rank, environ: Mapping[str, str]) -> None:
        """Prepare for this ``rank`` of the job described by ``environ``; nothing is connected yet."""
        self._rank = rank
        self._environ = environ
        self._store: Any = None
        self._has_tried = False

    def left_to_show(self, report: Report, *, unexplained: bool = False) -> Report | None:
        """Return ``report`` with the findings that no other rank has reported; None if nothing is left.

        Rank 0 reports all its findings. The others wait a moment for it, then report what it did not have.
        ``unexplained``: an error without a diagnosis, about which there is something to report nevertheless.
        """
        try:
            return self._unreported(report, unexplained)
        except Exception:
            # Twice is better than never: the store may have gone meanwhile.
            return report

    def _unreported(self, report: Report, unexplained: bool) -> Report | None:
        store = self._connected()
        if store is None:
            return report
        names = [_name_of(diagnosis) for diagnosis in report.diagnoses]
        if unexplained and not names:
            names.append("unexplained")
        if self._rank.number == 0:
            for name in (*names, "reported"):
                store.add(self._key(name), 1)
            if names and self._environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True):
                # The store ends with this process, which made it, and not with torchrun's agent.
                _wait_until(lambda: store.add(self._key("read"), 0) >= self._rank.size - 1)
            return report
        if names:
            # Not store.wait(), which writes to stderr on a timeout.
            _wait_until(lambda: store.check([self._key("reported")]))
        own = {name for name in names if store.add(self._key(name), 1) == 1}
        store.add(self._key("read"), 1)
        kept = tuple(one for one in report.diagnoses if _name_of(one) in own)
        return replace(report, diagnoses=kept) if own else None

    def status(self, is_conflict: bool, exit_code: int) -> int:
        """Return the exit status of a rank whose program succeeded: ``exit_code`` if it must signal a finding.

        torchrun takes a rank with a nonzero exit status for failed, and terminates the others, which may still be
        saving their work. So only the last one signals it; and none does where a failure would restart the job.
        """
        if not exit_code or self._environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
            return 0
        try:
            store = self._connected()
            if store is None:
                return exit_code if is_conflict else 0
            store.add(self._key("conflicts"), int(is_conflict))
            is_last = store.add(self._key("ended"), 1) == self._rank.size
            return exit_code if is_last and store.add(self._key("conflicts"), 0) else 0
        except Exception:
            return exit_code if is_conflict else 0

    def _key(self, name: str) -> str:
        job, attempt = (self._environ.get(f"TORCHELASTIC_{name}", "") for name in ("RUN_ID", "RESTART_COUNT"))
        return f"gradsan/{job}/{attempt}/{name}"

    def _connected(self) -> Any:
        if not self._has_tried:
            self._has_tried = True
            with contextlib.suppress(Exception):
                self._store = _connect(self._environ)
        return self._store


@contextlib.contextmanager
def undisturbed(rank: Rank | None) -> Iterator[None]:
    """Let a rank finish its report: when one rank has failed, torchrun ends the others with SIGTERM.

    The signal takes effect afterwards. A program's own handler stays in place, and so does the default one while the
    program itself runs: a rank waiting inside a collective would never run a handler in Python.
    """
    in_main = threading.current_thread() is threading.main_thread()
    if rank is None or not in_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    came: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if came:
            signal.raise_signal(signal.SIGTERM)


def _wait_until(is_so: Callable[[], bool]) -> None:
    until = time.monotonic() + _PATIENCE_SECONDS
    while not is_so() and time.monotonic() < until:
        time.sleep(_POLL_SECONDS)


def _connect(environ: Mapping[str, str]) -> Any:
    """Return a client of the job's store; None if the program uses no torch.distributed or there is no store."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.distributed.is_available():
        return None
    host, port = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
    # A TCPStore that cannot connect writes a page to stderr.
    socket.create_connection((host, port), timeout=_CONNECT_SECONDS).close()
    return torch.distributed.TCPStore(
        host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=_CONNECT_SECONDS)
    )


def _with_mark(path: str, mark: str) -> str:
    named = Path(path)
    return str(named.with_name(f"{named.stem}.{mark}{named.suffix}"))


def _name_of(diagnosis: Diagnosis) -> str:
    # Imported only when there is something to report: presenting needs rich.
    from gradsan.present.merge import identity

    return hashlib.sha256(repr(identity(diagnosis)).encode()).hexdigest()
