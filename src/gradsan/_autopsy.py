"""An error explained after the fact: ``explain_exception``, ``autopsy``, the session of ``gradsan run --autopsy``."""

from __future__ import annotations

import os
import platform
import sys
from typing import TYPE_CHECKING, Any, Literal

from gradsan import __version__
from gradsan.model import Diagnosis, Evidence, Program, Report, Seen

if TYPE_CHECKING:
    import torch

LanguageOption = Literal["en", "zh", "auto"]


class Explanation:
    """A report, to be read as data (``report``, ``diagnoses``), as text (``str``) or in a notebook."""

    def __init__(self, report: Report, language: LanguageOption = "auto") -> None:
        """Show ``report`` in ``language``; ``"auto"`` takes that of the environment."""
        self.report = report
        self._language = language

    @property
    def diagnoses(self) -> tuple[Diagnosis, ...]:
        """The findings, empty where gradsan does not know this error."""
        return self.report.diagnoses

    def __str__(self) -> str:
        """The report as the terminal shows it, without colour."""
        from gradsan.present import render_terminal
        from gradsan.text import choose_language

        language = choose_language(self._language, os.environ)
        return render_terminal(self.report, language=language, color=False, width=100, stacks=False)

    def __repr__(self) -> str:
        """The codes of the findings."""
        return f"<{type(self).__name__}: {', '.join(one.code for one in self.diagnoses) or '-'}>"

    def _repr_html_(self) -> str:
        from gradsan.present.html import render_fragment
        from gradsan.text import choose_language

        return render_fragment(self.report, language=choose_language(self._language, os.environ))

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        return {"text/plain": str(self), "text/html": self._repr_html_()}


def explain_exception(error: BaseException, *, language: LanguageOption = "auto") -> Explanation:
    """Explain an exception that autograd has raised, though nothing was recorded before.

    Its traceback must still be there: the frames hold the variables and the loss. Nothing of the program is run, and no
    hook is installed. Without findings where the error is none that gradsan knows.
    """
    program = Program(tuple(sys.argv), "failed", (type(error).__name__, _words_of(error)))
    return Explanation(report_of(_evidence(error), program), language)


def autopsy(loss: torch.Tensor, *, language: LanguageOption = "auto") -> Explanation:
    """Look for values in the graph of ``loss`` that were overwritten after they were saved, without running backward.

    Each finding is one that ``loss.backward()`` would stop at. Without findings where nothing is out of date.

    Raises:
        ValueError: where ``loss`` has no graph.
    """
    if loss.grad_fn is None:
        raise ValueError("the tensor has no graph: its grad_fn is None")
    from gradsan.postmortem import unwatched

    return Explanation(report_of(unwatched.evidence_in(loss, sys._getframe(1)), Program(tuple(sys.argv))), language)


class AutopsySession:
    """A session that watches nothing: it looks at the exception by which the program ends."""

    def __init__(self) -> None:
        """Know of no exception yet."""
        self._evidence = Evidence()

    def start(self) -> None:
        """Nothing is installed."""

    def stop(self) -> None:
        """Nothing was installed."""

    def examine(self, error: BaseException) -> None:
        """Look at an exception that has ended the program or a thread, while its frames are there."""
        found = _evidence(error)
        known = self._evidence
        self._evidence = Evidence((*known.conflicts, *found.conflicts), (*known.failures, *found.failures))

    def report(self, program: Program) -> Report:
        """What was found."""
        return report_of(self._evidence, program)


def report_of(evidence: Evidence, program: Program) -> Report:
    """The report of what an autopsy has found."""
    from gradsan.diagnose import diagnose

    diagnoses = diagnose(evidence)
    loaded = sys.modules.get("torch")
    return Report(
        program=program,
        seen=Seen(),
        diagnoses=diagnoses,
        gradsan=__version__,
        torch=None if loaded is None else str(loaded.__version__),
        python=platform.python_version(),
        mode="autopsy",
    )


def _evidence(error: BaseException) -> Evidence:
    """What lies behind an error; nothing in a process that has no torch."""
    if sys.modules.get("torch") is None:
        return Evidence()
    from gradsan.postmortem import unwatched

    return unwatched.evidence_of(error)


def _words_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return ""
