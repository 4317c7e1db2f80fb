"""Watched process: its report is on disk from the first finding on, and whole however the process ends.

A finding is written down when it is made, so that ``SIGKILL`` takes nothing away. A process that ends by ``os._exit``,
as forked children of multiprocessing do, tells before that. A forked child becomes a process of its own here: it
reports what it found since the fork, in the folder of the run (:mod:`gradsan.launch.processes`).
"""

from __future__ import annotations

import _thread
import contextlib
import os
import secrets
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from gradsan._imports import imports_by
from gradsan.model import Conflict, Failure, Message, Program, Report
from gradsan_start import log, shown

if TYPE_CHECKING:
    from gradsan.launch.starts import Starts

_LAST_WORDS_SECONDS = 20.0
"""How long the report of a process that wants to be gone may take."""

_current: Member | None = None
_forks = 0
_has_fork_hook = False


class Watched(Protocol):
    """What a member needs of ``gradsan.launch.watcher.Watcher``."""

    def report(self, program: Program) -> Report:
        """What was found so far."""

    def begin_anew(self) -> None:
        """In a forked child: count from now on."""

    def stop(self) -> None:
        """End watching."""

    def examine(self, error: BaseException) -> None:
        """Look at an exception that nobody caught."""


class Member:
    """This process in a run of possibly several; ``is_child`` once it is another than the one that made the folder."""

    def __init__(
        self,
        watched: Watched,
        folder: Path | None,
        *,
        language: str,
        write: Callable[[Report], object] | None = None,
        leaves: Callable[[int], int] | None = None,
        is_child: bool = False,
    ) -> None:
        """``folder`` is the run's, None where there is none. ``write`` takes each unfinished report of the process that
        was started; ``leaves`` gives the report out when the process ends by ``os._exit``, and that of a child whose
        folder is gone, and says with which status it ends.
        """
        self.is_child = is_child
        self._watched = watched
        self._folder = folder
        self._language = language
        self._write = write
        self._leaves = leaves
        self._argv = tuple(sys.argv)
        self._name = ""
        self.undo: list[Callable[[], None]] = []
        """What is to be taken back when this process has reported."""
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._file = f"{self._pid}-{secrets.token_hex(4)}.json"
        self._lock = threading.Lock()
        self._known: set[object] = set()
        self._is_over = self._has_left = False

    def watch(self, starts: Starts | None = None) -> None:
        """From now on forks and ``os._exit`` of this process are known; one member at a time.

        ``starts`` notes the Python processes that it starts.
        """
        global _current
        _current = self
        if starts is not None:
            starts.follow()
            self.undo.append(starts.stop)
        _listen_to_forks()
        _exits.install()

    def over(self) -> None:
        """This process has reported, or will not: nothing is written any more, and the process is as it was."""
        global _current
        self._is_over = True
        while self.undo:
            self.undo.pop()()
        if _current is self:
            _current = None
            _exits.remove()

    def found(self, finding: Conflict | Failure) -> None:
        """Write down what was found so far, where ``finding`` is one of a new kind."""
        kind = _kind(finding)
        if self._is_over or kind in self._known or not self._lock.acquire(blocking=False):
            return
        try:
            self._known.add(kind)
            with imports_by():
                report = unfinished(self._watched.report(Program(self._argv, "failed", None, ended=False)))
                if self._write is not None and not self.is_child:
                    self._write(report)
                self._leave(report)
        finally:
            self._lock.release()

    def end(self, outcome: Program | None = None) -> bool:
        """Leave the last report of a child in the folder; False where that is gone: the child has to report itself."""
        if self._is_over or self._folder is None:
            return self._has_left
        self.over()
        with imports_by():
            report = self._last_report(outcome or Program(self._argv))
            is_left = not report.diagnoses or self._leave(report)
        seen = report.seen
        if is_left:
            counts = (seen.saves, seen.writes, seen.backwards, seen.steps)
            self._has_left = log(str(self._folder), "ended", name=self.name(), seen=counts)
        return self._has_left

    def leaving(self, status: int) -> int:
        """This process ends by ``os._exit``; the status that it ends with."""
        if self._is_over:
            return status
        given = [status]

        def publish() -> None:
            if not (self.is_child and self.end()) and self._leaves is not None:
                given[0] = self._leaves(status)

        _within_time(publish)
        return given[0]

    def forked(self) -> None:
        """This is a child now, which inherited what its parent had."""
        self.is_child = True
        self._begin()
        self._name = f"forked by {os.getppid()}"
        self._watched.begin_anew()

    def name(self) -> str:
        """What the report calls this process."""
        multiprocessing = sys.modules.get("multiprocessing.process")
        if multiprocessing is not None and multiprocessing.parent_process() is not None:
            return str(multiprocessing.current_process().name)
        return self._name or shown(["python", *sys.orig_argv[1:]])

    def _last_report(self, program: Program) -> Report:
        report = self._watched.report(program)
        if report.seen.saves:
            # What the end of watching brings to light needs graphs.
            self._watched.stop()
            report = self._watched.report(program)
        return report

    def _leave(self, report: Report) -> bool:
        """Put a report into the folder of the run, in one move."""
        if self._folder is None:
            return False
        from gradsan.present.json import render_json

        # Relative to nowhere: it is read by a process that may be elsewhere.
        text = render_json(report, language=self._language, cwd=self._folder / "nowhere")
        path = self._folder / self._file
        try:
            part = path.with_suffix(".part")
            part.write_text(text, encoding="utf-8")
            part.replace(path)
        except OSError:
            return False
        return log(str(self._folder), "found", file=self._file, name=self.name())


def unfinished(report: Report) -> Report:
    """``report`` with the words that say of it that the program was still running."""
    spots = (*report.seen.blind_spots, Message("processes.unfinished"))
    return replace(report, seen=replace(report.seen, blind_spots=spots))


def current() -> Member | None:
    """The member that this process is, None where nobody watches it as a whole."""
    return _current


def forks() -> int:
    """How many children this process has forked while no member took note of them; from the first call on."""
    _listen_to_forks()
    return _forks


def _kind(finding: Conflict | Failure) -> object:
    """What is the same for findings that are met again and again, read off without explaining them."""
    if isinstance(finding, Failure):
        return finding.row, finding.site
    writes = finding.writes
    ends = (writes[0].site, writes[-1].site) if writes else ()
    return finding.way, finding.raised, finding.save.site, ends, finding.use.site


def _listen_to_forks() -> None:
    # There is no way to take such a hook back; without a member it does nothing.
    global _has_fork_hook
    if not _has_fork_hook and hasattr(os, "register_at_fork"):
        _has_fork_hook = True
        os.register_at_fork(after_in_child=_after_fork, after_in_parent=_count_fork)


def _count_fork() -> None:
    global _forks
    _forks += _current is None


def _after_fork() -> None:
    if _current is not None:
        with contextlib.suppress(Exception):
            _current.forked()


def _within_time(work: Callable[[], None]) -> None:
    """Do ``work`` in a thread, and wait for it only so long: whoever wants to be gone must be able to go."""
    done = _thread.allocate_lock()
    done.acquire()

    def run() -> None:
        try:
            with contextlib.suppress(Exception):
                work()
        finally:
            done.release()

    try:
        _thread.start_new_thread(run, ())
    except RuntimeError:
        # The interpreter is ending.
        run()
    done.acquire(timeout=_LAST_WORDS_SECONDS)


class _Exits:
    """``os._exit`` while there is a member: the same function, with the member's last words before it."""

    def __init__(self) -> None:
        self._real: Any = os._exit
        self._owners: list[Any] = []

    def install(self) -> None:
        """Stand in for ``os._exit``, under both of its names, so that it is pickled as it was."""
        if self._owners:
            return
        real = self._real = os._exit
        home: Any = sys.modules.get(getattr(real, "__module__", ""))

        def _exit(*args: Any, **kwargs: Any) -> Any:
            given = args[0] if args else kwargs.get("status")
            member = _current
            if member is None or len(args) + len(kwargs) != 1 or type(given) is not int:
                return real(*args, **kwargs)
            try:
                given = member.leaving(given)
            finally:
                real(given)

        _exit.__module__, _exit.__qualname__, _exit.__doc__ = real.__module__, real.__qualname__, real.__doc__
        owners: tuple[Any, ...] = (os, home)
        for owner in owners:
            if owner is not None and getattr(owner, "_exit", None) is real:
                owner._exit = _exit
                self._owners.append((owner, _exit))

    def remove(self) -> None:
        """Put the function back where ours still stands."""
        for owner, ours in self._owners:
            if owner._exit is ours:
                owner._exit = self._real
        self._owners.clear()


_exits = _Exits()
