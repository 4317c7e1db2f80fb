"""Session of a run, wrapped so that no failure of gradsan reaches the program."""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from gradsan import __version__
from gradsan._errors import HaltError
from gradsan.launch.sentences import own_failure
from gradsan.model import Conflict, Failure, Message, Program, Report, Seen


class Session(Protocol):
    """Interface of ``gradsan._session.Session`` for a watcher."""

    def start(self) -> None:
        """Begin watching this process."""

    def stop(self) -> None:
        """End watching and restore torch."""

    def report(self, program: Program) -> Report:
        """Return the report of the findings."""


class Watcher:
    """Starts, stops and queries a session.

    Failures in it are kept in ``problems`` instead of being raised, and so are its problems with this torch.

    ``on_finding``, set before the start, is called with each finding. ``saw_autograd_error`` says whether one
    of the uncaught exceptions was autograd's, ``was_halted`` whether one was gradsan's own, by which it
    stopped the program on request. ``unseen`` are further *blind spots* for the report.
    """

    def __init__(self, open_session: Callable[[], Session]) -> None:
        """Prepare; ``open_session`` is called when watching begins."""
        self.on_finding: Callable[[Conflict | Failure], None] | None = None
        self.problems: list[Message] = []
        self.unseen: list[Message] = []
        self._open_session = open_session
        self._session: Session | None = None
        self.saw_autograd_error = False
        self.was_halted = False
        self._has_been_asked = False

    def start(self) -> None:
        """Open the session and start it."""
        self._has_been_asked = True
        try:
            self._session = self._open_session()
            if hasattr(self._session, "on_finding"):
                self._session.on_finding = self.on_finding
            self._session.start()
            self.problems.extend(getattr(self._session, "problems", ()))
        except Exception as failure:
            self._keep("start", failure)
            self.stop()
            self._session = None

    def take(self, session: Session) -> None:
        """Use ``session``, which another caller has started."""
        self._has_been_asked = True
        self._session = session

    def examine(self, error: BaseException) -> None:
        """Have the session examine an uncaught exception."""
        self.was_halted = self.was_halted or isinstance(error, HaltError)
        self.saw_autograd_error = self.saw_autograd_error or self._is_of_autograd(error)
        examine = getattr(self._session, "examine", None)
        if examine is None:
            return
        try:
            examine(error)
        except Exception as failure:
            self._keep("report", failure)

    def begin_anew(self) -> None:
        """Have the session start counting anew, in a forked child."""
        self.problems.clear()
        self.saw_autograd_error = self.was_halted = False
        begin = getattr(self._session, "begin_anew", None)
        if begin is not None:
            begin()

    def stop(self) -> None:
        """Stop the session, if there is one."""
        if self._session is None:
            return
        try:
            self._session.stop()
        except Exception as failure:
            self._keep("stop", failure)

    def report(self, program: Program) -> Report:
        """Return the session's report; without one, a report without diagnoses, with the reason under *blind spots*."""
        if self._session is not None:
            try:
                report = self._session.report(program)
                spots = (*self.unseen, *report.seen.blind_spots)
                return replace(report, seen=replace(report.seen, blind_spots=spots)) if self.unseen else report
            except Exception as failure:
                self._keep("report", failure)
        blind_spots = tuple(self.problems) if self._has_been_asked else (Message("cli.no_torch_imported"),)
        return Report(
            program=program,
            seen=Seen(blind_spots=blind_spots),
            diagnoses=(),
            gradsan=__version__,
            torch=None,
            python=platform.python_version(),
        )

    def _is_of_autograd(self, error: BaseException) -> bool:
        try:
            from gradsan.catalogue import comes_from_autograd

            return comes_from_autograd(error)
        except Exception:
            # The program's own classes may fail in ``str``.
            return False

    def _keep(self, what: str, failure: Exception) -> None:
        self.problems.append(own_failure(what, failure))
