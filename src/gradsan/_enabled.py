"""Program watched by ``gradsan.enable()``: notes on its exceptions, its report at its end, its children.

``GRADSAN_OPTIONS`` and ``[tool.gradsan]`` choose the reports. Its exit status stays its own.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import cast

from gradsan._errors import GradsanError
from gradsan._imports import call_after_torch_import
from gradsan._notes import annotate_with
from gradsan._session import Session
from gradsan._terms import Mode, chosen, diagnosed
from gradsan.launch import watched_process
from gradsan.launch.outcome import Publisher
from gradsan.launch.processes import Job, open_job
from gradsan.launch.sentences import complain, own_failure, spoken_language
from gradsan.launch.starts import Starts
from gradsan.launch.uncaught import call_before_shown
from gradsan.launch.watched_process import Member
from gradsan.launch.watcher import Watcher
from gradsan.model import Conflict, Failure, Message, Program, Report
from gradsan.options import Options, OptionsError, read_options, working_directory
from gradsan.text import Language, choose_language
from gradsan_start import ASKED


def enable_as_asked(asked: str) -> None:
    """Watch this process from its import of torch on, as requested by ``GRADSAN=asked`` in the environment."""
    mode = ASKED.get(asked.lower())
    language = spoken_language((), os.environ)
    if mode is None:
        complain(Message("cli.unknown_asked", {"asked": asked, "known": ", ".join(ASKED)}), language)
    else:
        call_after_torch_import(partial(_enable, cast("Mode | None", mode or None), language))


def _enable(mode: Mode | None, language: Language) -> None:
    try:
        stretch = Enabled(mode, None, has_notes=False)
        stretch.start()
        for problem in stretch.problems:
            complain(problem, language)
    except Exception as failure:
        complain(own_failure("start", failure), language)


def _shows_errors_itself() -> bool:
    """Whether a host shows errors and goes on after them: a notebook, pytest."""
    return any(name in sys.modules for name in ("IPython", "_pytest"))


class Enabled:
    """The stretch from an ``enable()`` to its ``disable()``, or to the end of the process."""

    def __init__(self, mode: Mode | None, native: bool | None, *, has_notes: bool = True) -> None:
        """Prepare; ``mode`` None is the one of the options; ``native`` as in :class:`Session`. Watching has not begun.

        ``has_notes`` False: errors get no note if a report follows their traceback.
        """
        self._has_notes = has_notes
        self._directory = working_directory()
        options, self._publisher = self._options_and_publisher()
        if mode is not None:
            options = replace(
                options, deep=mode == "deep", heal=mode == "heal", nonfinite=mode == "nonfinite", autopsy=False
            )
        asked, terms = chosen(options, self._publisher.suppressions.wants)
        self._options = options
        self._session = Session(asked, native=native, terms=terms)
        self._watcher = Watcher(lambda: self._session)
        self._argv = tuple(getattr(sys, "argv", ()))
        self._error: BaseException | None = None
        self._undo: list[Callable[[], object]] = []
        self._job: Job | None = None
        self._member: Member | None = None

    @property
    def problems(self) -> tuple[Message, ...]:
        """Problems of gradsan with this torch, known after the start."""
        return self._session.problems

    def start(self) -> None:
        """Begin watching.

        Raises:
            ImportError: if torch is not installed.
        """
        self._session.on_finding = self._found
        self._session.start()
        self._watcher.take(self._session)
        self._undo.append(call_before_shown(self._examine))
        self._session.call_with_errors(self._explain)
        # A process watched as a whole reports at its end already.
        if watched_process.current() is None:
            self._publish_at_exit()

    def stop(self) -> Report:
        """End watching, undo everything, and return the report, which is also written to the files."""
        self._leave()
        self._session.stop()
        report = self._session.report(self._program())
        if self._job is not None:
            report = self._job.gather(report)
            self._job.close()
        if self._member is not None:
            self._publisher.write(report)
        return report

    def _leave(self) -> None:
        while self._undo:
            self._undo.pop()()

    def _options_and_publisher(self) -> tuple[Options, Publisher]:
        """Return the options and the publisher; options that are invalid are reported, and defaults used."""
        try:
            options = read_options({}, os.environ, self._directory)
            return options, Publisher(options, self._directory)
        except OptionsError as problem:
            complain(problem.message, choose_language("auto", os.environ))
            return Options(), Publisher(Options(), self._directory)

    def _publish_at_exit(self) -> None:
        self._job = open_job(self._options, self._directory, self._watcher.unseen)
        folder = None if self._job is None else self._job.folder
        self._member = Member(
            self._watcher,
            folder,
            language=self._publisher.language,
            write=self._publisher.write_unfinished,
            leaves=self._leaves,
        )
        self._member.watch(Starts(str(folder)) if folder is not None else None)
        atexit.register(self._at_exit)
        self._undo += [self._member.over, lambda: atexit.unregister(self._at_exit)]

    def _found(self, finding: Conflict | Failure) -> None:
        if self._member is not None:
            self._member.found(finding)

    def _examine(self, error: BaseException) -> None:
        if threading.current_thread() is threading.main_thread():
            self._error = error
        with contextlib.suppress(Exception):
            found = self._session.examine(error)
            if found is not None:
                self._explain(error, found)

    def _explain(self, error: BaseException, found: Conflict | Failure | None) -> None:
        """Add the short diagnosis to an error, or why there is none; gradsan's own errors explain themselves."""
        if not (self._has_notes or _shows_errors_itself()) or (found is None and isinstance(error, GradsanError)):
            return
        diagnosis = None if found is None else diagnosed(found)
        if diagnosis is None:
            spots = self._session.evidence().seen.blind_spots
            annotate_with(error, (), spots, self._options.lang)
        elif self._publisher.suppressions.wants(diagnosis):
            annotate_with(error, (diagnosis,), (), self._options.lang)

    def _at_exit(self) -> None:
        self._publish(self._program())

    def _leaves(self, status: int) -> int:
        failed = ("os._exit", str(status))
        ended = Program(self._argv, "failed", failed) if status else Program(self._argv)
        self._publish(ended, flushes=False)
        return status

    def _publish(self, program: Program, flushes: bool = True) -> None:
        member = self._member
        assert member is not None
        is_child = member.is_child
        if is_child and member.end(program):
            return
        self._leave()
        self._publisher.publish(self._watcher, program, self._job, is_child=is_child, flushes=flushes)
        if self._job is not None and not is_child:
            self._job.close()

    def _program(self) -> Program:
        error = None if isinstance(self._error, SystemExit) else self._error
        return Program.ended_by(error, self._argv)
