"""Python interface: ``watch``, ``heal``, ``enable`` and ``disable``."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar

from gradsan._session import Session
from gradsan._terms import Mode, Terms
from gradsan.model import Diagnosis, Message, Program, Report

if TYPE_CHECKING:
    from typing_extensions import Self

    from gradsan._enabled import Enabled
    from gradsan.suppress import Rule

LanguageOption = Literal["en", "zh", "auto"]
P = ParamSpec("P")
R = TypeVar("R")


class watch:  # noqa: N801 - used as a function: ``with gradsan.watch():``
    """Watch a ``with`` block, or every call of a decorated function.

    A failing backward inside raises PyTorch's own error (a ``RuntimeError`` whose message begins the same), with a
    short diagnosis added as an exception note. ``report`` and ``diagnoses`` have all findings, in the block and after.
    Nested and repeated use is harmless; an instance that is entered again reports the last stretch.

    ``halt`` stops the program at the first error found, silent ones included, with a :class:`HaltError`; ``early``
    does so already at the write of a value that a live graph still holds (it needs and selects deep mode). ``strict``
    turns notes into warnings, and halts at warnings, too. In heal mode ``only`` selects the conflicts to heal, by
    code and place (``"GS101"``, ``"GS2xx"``, ``"train.py:12"``, ``"GS101:train.py:12"``; others fail as in
    PyTorch), and ``max_bytes`` bounds the memory of the originals; beyond it a :class:`HealingEndedError` is raised.

    ``language``: ``"en"``, ``"zh"`` or ``"auto"`` (from the environment), for the note and the printed report.
    """

    def __init__(
        self,
        mode: Mode = "watch",
        *,
        language: LanguageOption = "auto",
        native: bool | None = None,
        halt: bool = False,
        early: bool = False,
        strict: bool = False,
        only: str | Iterable[str] | None = None,
        max_bytes: int | None = None,
    ) -> None:
        """Choose how to watch; watching begins when the block is entered.

        Raises:
            ValueError: for an ``only`` that names neither codes nor places.
        """
        rules: tuple[Rule, ...] = ()
        if only is not None:
            from gradsan.suppress import rules_of

            rules = rules_of(only)
        self._terms = Terms(halt=halt, early=early, strict=strict, only=rules, max_bytes=max_bytes)
        self._mode: Mode = mode
        self._native = native
        self._language = language
        self._sessions: list[Session] = []
        self._last: Session | None = None
        self._error: BaseException | None = None

    def __enter__(self) -> Self:
        """Begin watching."""
        session = Session(self._mode, native=self._native, terms=self._terms)
        session.start()
        _warn_of(session.problems, self._language)
        self._sessions.append(session)
        self._last = session
        self._error = None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End watching; an error that a conflict explains gets the short diagnosis as a note."""
        session = self._sessions.pop()
        if error is not None:
            session.examine(error)
        session.stop()
        self._error = error
        if error is not None:
            from gradsan._notes import annotate

            annotate(error, self.report, self._language)

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Return ``function`` wrapped so that every call of it is watched."""

        @functools.wraps(function)
        def watched(*args: P.args, **kwargs: P.kwargs) -> R:
            with self:
                return function(*args, **kwargs)

        return watched

    @property
    def report(self) -> Report:
        """The report of the stretch so far, or of the last one. Raises RuntimeError if never entered."""
        if self._last is None:
            raise RuntimeError("gradsan.watch() has not been entered yet")
        return self._last.report(Program.ended_by(self._error))

    @property
    def diagnoses(self) -> tuple[Diagnosis, ...]:
        """The findings of :attr:`report`."""
        return self.report.diagnoses

    def __str__(self) -> str:
        """Return the report as shown on the terminal, without colour."""
        return self._render(width=100)

    def _render(self, width: int) -> str:
        from gradsan.present import render_terminal
        from gradsan.text import choose_language

        language = choose_language(self._language, os.environ)
        return render_terminal(self.report, language=language, color=False, width=width, stacks=False)

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        if self._last is None:
            return {"text/plain": repr(self)}
        return {"text/plain": str(self), "text/html": self._repr_html_()}

    def _repr_html_(self) -> str:
        from gradsan.present.html import render_fragment
        from gradsan.text import choose_language

        return render_fragment(self.report, language=choose_language(self._language, os.environ))


def heal(
    max_bytes: int | None = None, *, only: str | Iterable[str] | None = None, language: LanguageOption = "auto"
) -> watch:
    """Watch in heal mode: backward gets each saved value unmodified, and every healed conflict is reported.

    ``max_bytes`` bounds the memory that the originals take at a time: those separated by a write from the program's
    tensors, and copies where copy-on-write is impossible. Beyond it :class:`HealingEndedError` is raised. None:
    no bound. ``only`` as in :class:`watch`; None: every conflict is healed.

    Raises:
        ValueError: for an ``only`` that names neither codes nor places.
    """
    return watch("heal", language=language, only=only, max_bytes=max_bytes)


_enabled: list[Enabled] = []


def enable(mode: Mode | None = None, *, native: bool | None = None) -> None:
    """Watch from now on, until :func:`disable`. Every call needs its own :func:`disable`.

    A failing backward raises PyTorch's own error, with a short diagnosis as an exception note. A stretch still enabled
    at the end of the program is reported then: on stderr if there are findings, and in the files named by
    ``GRADSAN_OPTIONS`` and ``[tool.gradsan]``. The exit status stays the program's own. ``mode`` None is the mode of
    these options, ``"watch"`` by default.

    Raises:
        ImportError: if torch is not installed.
    """
    from gradsan._enabled import Enabled

    stretch = Enabled(mode, native)
    stretch.start()
    _warn_of(stretch.problems, "auto")
    _enabled.append(stretch)


def _warn_of(problems: Iterable[Message], language: LanguageOption) -> None:
    """Warn of problems with this torch, at the line that switches watching on."""
    for problem in problems:
        from gradsan.text import choose_language, say

        warnings.warn(say(problem, choose_language(language, os.environ)), RuntimeWarning, stacklevel=3)


def disable() -> Report | None:
    """End the stretch begun by the last :func:`enable` and return its report; None if none was enabled.

    A stretch that has been ended is not reported at the end of the program.
    """
    return _enabled.pop().stop() if _enabled else None
