"""Session of a run, held so that no failure of gradsan reaches the program."""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from gradsan import __version__
from gradsan._errors import HaltError
from gradsan.model import Conflict, Failure, Message, Program, Report, Seen


class Session(Protocol):
    """What watching needs of ``gradsan._session.Session``."""

    def start(self) -> None:
        """Begin to watch this process."""

    def stop(self) -> None:
        """Leave torch as it was before."""

    def report(self, program: Program) -> Report:
        """What was found."""


class Watcher:
    """Starts, stops and asks a session.

    What goes wrong in it is kept in ``problems`` instead of being raised, and so is what it cannot do with this torch.

    ``on_finding``, set before the start, is called with each finding. ``saw_autograd_error`` says whether one
    of the exceptions that nobody caught was autograd's, ``was_halted`` whether one was gradsan's own, by which it
    stopped the program as it was asked to. ``unseen`` is what else the report is to say under *blind spots*.
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
        """Ask ``session``, which somebody else has started."""
        self._has_been_asked = True
        self._session = session

    def examine(self, error: BaseException) -> None:
        """Have the session look at an exception that nobody caught."""
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
        """In a forked child: have the session count from now on."""
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
        """The session's report; where there is none, a report without diagnoses that says under *blind spots* why."""
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
            # The program's own classes may fail at being shown.
            return False

    def _keep(self, what: str, failure: Exception) -> None:
        values = {"kind": type(failure).__name__, "text": _first_line(failure)}
        self.problems.append(Message(f"cli.failed_{what}", values))


def _first_line(failure: Exception) -> str:
    try:
        return (str(failure).splitlines() or [""])[0]
    except Exception:
        return ""
