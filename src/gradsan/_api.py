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

    A failing backward inside raises what PyTorch raises (a ``RuntimeError`` whose message begins the same), with a
    short diagnosis added as an exception note. ``report`` and ``diagnoses`` tell everything, in the block and after.
    Nested and repeated use is harmless; one instance may be entered again, and then reports the last stretch.

    ``halt`` stops the program at the first error found, silent ones included, with a :class:`HaltError`; ``early``
    already where a value is overwritten that a live graph still holds (it needs and chooses deep mode). ``strict``
    makes warnings of notes, and halts at warnings, too. In heal mode ``only`` names the conflicts that are healed, by
    code and place (``"GS101"``, ``"GS2xx"``, ``"train.py:12"``, ``"GS101:train.py:12"``; others fail as PyTorch would
    have it), and ``max_bytes`` bounds what the originals may take; beyond it a :class:`HealingEndedError` is raised.

    ``language``: ``"en"``, ``"zh"`` or ``"auto"`` (from the environment), for the note and the shown report.
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
        """Choose how to watch; nothing happens before the block is entered.

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
        """Begin to watch."""
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
        """Watch every call of ``function``."""

        @functools.wraps(function)
        def watched(*args: P.args, **kwargs: P.kwargs) -> R:
            with self:
                return function(*args, **kwargs)

        return watched

    @property
    def report(self) -> Report:
        """What was found, so far or in the last stretch."""
        if self._last is None:
            raise RuntimeError("gradsan.watch() has not been entered yet")
        error = self._error
        program = Program(
            outcome="finished" if error is None else "failed",
            exception=None if error is None else (type(error).__name__, str(error)),
        )
        return self._last.report(program)

    @property
    def diagnoses(self) -> tuple[Diagnosis, ...]:
        """The findings of :attr:`report`."""
        return self.report.diagnoses

    def __str__(self) -> str:
        """The report as the terminal shows it, without colour."""
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
    """Watch in heal mode: backward gets each saved value as it was, and every healed conflict is reported.

    ``max_bytes`` bounds the memory that the originals take at once: those that a write has separated from what the
    program sees, and copies of what cannot be kept copy-on-write. Beyond it :class:`HealingEndedError` is raised. None:
    no bound. ``only`` as in :class:`watch`; None: every conflict is healed.

    Raises:
        ValueError: for an ``only`` that names neither codes nor places.
    """
    return watch("heal", language=language, only=only, max_bytes=max_bytes)


_enabled: list[Enabled] = []


def enable(mode: Mode | None = None, *, native: bool | None = None) -> None:
    """Watch from now on, until :func:`disable`. Every call needs one :func:`disable`.

    A failing backward raises what PyTorch raises, with a short diagnosis as an exception note. What is still enabled
    when the program ends is reported then: on stderr where there is something to report, and in the files that
    ``GRADSAN_OPTIONS`` and ``[tool.gradsan]`` name. The exit status stays the program's own. ``mode`` is what these
    options say where it is None, and where they say nothing ``"watch"``.

    Raises:
        ImportError: where torch is not installed.
    """
    from gradsan._enabled import Enabled

    stretch = Enabled(mode, native)
    stretch.start()
    _warn_of(stretch.problems, "auto")
    _enabled.append(stretch)


def _warn_of(problems: Iterable[Message], language: LanguageOption) -> None:
    """Warn of what cannot be watched, at the line that switches watching on."""
    for problem in problems:
        from gradsan.text import choose_language, say

        warnings.warn(say(problem, choose_language(language, os.environ)), RuntimeWarning, stacklevel=3)


def disable() -> Report | None:
    """End the stretch begun by the last :func:`enable` and return its report; None where nothing was enabled.

    Nothing is reported at the end of the program about a stretch that has ended.
    """
    return _enabled.pop().stop() if _enabled else None
