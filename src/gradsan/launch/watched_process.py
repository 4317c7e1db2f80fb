"""Watched process: its report is on disk from the first finding on, and complete however the process ends.

A finding is written when it is made, so that ``SIGKILL`` loses nothing. A process that ends by ``os._exit``,
like forked children of multiprocessing, reports before that. A forked child becomes a process of its own here: it
reports its findings since the fork, in the folder of the run (:mod:`gradsan.launch.processes`).
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
"""How long the final report of a process that is about to exit may take."""

_current: Member | None = None
_forks = 0
_has_fork_hook = False


class Watched(Protocol):
    """Interface of ``gradsan.launch.watcher.Watcher`` for a member."""

    def report(self, program: Program) -> Report:
        """Return the report of the findings so far."""

    def begin_anew(self) -> None:
        """Start counting anew in a forked child."""

    def stop(self) -> None:
        """End watching."""

    def examine(self, error: BaseException) -> None:
        """Examine an uncaught exception."""


class Member:
    """This process in a run of one or more; ``is_child`` if it is another one than the folder's maker."""

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
        """Begin as a member of the run in ``folder`` (None: there is none).

        ``write`` is called with each unfinished report of the process that was started; ``leaves`` publishes the report
        when the process ends by ``os._exit``, or that of a child whose folder is gone, and returns the exit status.
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
        """Undo functions to call when this process has reported."""
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._file = f"{self._pid}-{secrets.token_hex(4)}.json"
        self._lock = threading.Lock()
        self._known: set[object] = set()
        self._is_over = self._has_left = False

    def watch(self, starts: Starts | None = None) -> None:
        """Follow forks and ``os._exit`` of this process from now on; one member at a time.

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
        """Stop writing and restore the process, once it has reported or will not."""
        global _current
        self._is_over = True
        while self.undo:
            self.undo.pop()()
        if _current is self:
            _current = None
            _exits.remove()

    def found(self, finding: Conflict | Failure) -> None:
        """Write the findings so far, if ``finding`` is of a new kind."""
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
        """Write the last report of a child to the folder; return False if that is gone: then it must report itself."""
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
        """Publish the report as this process ends by ``os._exit``; return the exit status."""
        if self._is_over:
            return status
        given = [status]

        def publish() -> None:
            if not (self.is_child and self.end()) and self._leaves is not None:
                given[0] = self._leaves(status)

        _within_time(publish)
        return given[0]

    def forked(self) -> None:
        """Become a child: this process has inherited its parent's state."""
        self.is_child = True
        self._begin()
        self._name = f"forked by {os.getppid()}"
        self._watched.begin_anew()

    def name(self) -> str:
        """Return this process's name in the report."""
        multiprocessing = sys.modules.get("multiprocessing.process")
        if multiprocessing is not None and multiprocessing.parent_process() is not None:
            return str(multiprocessing.current_process().name)
        return self._name or shown(["python", *sys.orig_argv[1:]])

    def _last_report(self, program: Program) -> Report:
        report = self._watched.report(program)
        if report.seen.saves:
            # Findings made at the end of watching need live graphs.
            self._watched.stop()
            report = self._watched.report(program)
        return report

    def _leave(self, report: Report) -> bool:
        """Write a report to the folder of the run, atomically."""
        if self._folder is None:
            return False
        from gradsan.present.json import render_json

        # Relative to no real folder: the reader's process may be elsewhere.
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
    """Return ``report`` with the note that the program was still running."""
    spots = (*report.seen.blind_spots, Message("processes.unfinished"))
    return replace(report, seen=replace(report.seen, blind_spots=spots))


def current() -> Member | None:
    """Return the member of this process; None if it is not watched as a whole."""
    return _current


def forks() -> int:
    """Return how many children this process has forked without a member, counted from the first call on."""
    _listen_to_forks()
    return _forks


def _kind(finding: Conflict | Failure) -> object:
    """Return a key that is equal for repeated findings, computed without diagnosing them."""
    if isinstance(finding, Failure):
        return finding.row, finding.site
    writes = finding.writes
    ends = (writes[0].site, writes[-1].site) if writes else ()
    return finding.bypass, finding.raised, finding.save.site, ends, finding.use.site


def _listen_to_forks() -> None:
    # Such a hook cannot be removed; without a member it does nothing.
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
    """Run ``work`` in a thread, with a time limit: a process that wants to exit must be able to."""
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
    """``os._exit`` while there is a member: the same function, preceded by the member's final report."""

    def __init__(self) -> None:
        self._real: Any = os._exit
        self._owners: list[Any] = []

    def install(self) -> None:
        """Replace ``os._exit``, under both of its names, so that it is pickled like the original."""
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
        """Restore the function where ours is still in place."""
        for owner, ours in self._owners:
            if owner._exit is ours:
                owner._exit = self._real
        self._owners.clear()


_exits = _Exits()
