"""Explanation of an error after the fact: ``explain_exception``, ``autopsy``, and the session of ``--autopsy``."""

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
    """A report, readable as data (``report``, ``diagnoses``), as text (``str``) or in a notebook."""

    def __init__(self, report: Report, language: LanguageOption = "auto") -> None:
        """Show ``report`` in ``language``; ``"auto"`` is that of the environment."""
        self.report = report
        self._language = language

    @property
    def diagnoses(self) -> tuple[Diagnosis, ...]:
        """The findings; empty if gradsan does not know the error."""
        return self.report.diagnoses

    def __str__(self) -> str:
        """Return the report as shown on the terminal, without colour."""
        from gradsan.present import render_terminal
        from gradsan.text import choose_language

        language = choose_language(self._language, os.environ)
        return render_terminal(self.report, language=language, color=False, width=100, stacks=False)

    def __repr__(self) -> str:
        """Return the codes of the findings."""
        return f"<{type(self).__name__}: {', '.join(one.code for one in self.diagnoses) or '-'}>"

    def _repr_html_(self) -> str:
        from gradsan.present.html import render_fragment
        from gradsan.text import choose_language

        return render_fragment(self.report, language=choose_language(self._language, os.environ))

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        return {"text/plain": str(self), "text/html": self._repr_html_()}


def explain_exception(error: BaseException, *, language: LanguageOption = "auto") -> Explanation:
    """Explain an exception raised by autograd, without any earlier recording.

    Its traceback must still be attached: the frames hold the variables and the loss. Runs no code of the program and
    installs no hook. The result has no diagnoses if gradsan does not know the error.
    """
    return Explanation(report_of(_evidence(error), Program.ended_by(error, tuple(sys.argv))), language)


def autopsy(loss: torch.Tensor, *, language: LanguageOption = "auto") -> Explanation:
    """Find values in the graph of ``loss`` that were overwritten after they were saved, without running backward.

    Each finding would make ``loss.backward()`` fail. The result has no diagnoses if no saved value is stale.

    Raises:
        ValueError: if ``loss`` has no graph.
    """
    if loss.grad_fn is None:
        raise ValueError("the tensor has no graph: its grad_fn is None")
    from gradsan.postmortem import unwatched

    return Explanation(report_of(unwatched.evidence_in(loss, sys._getframe(1)), Program(tuple(sys.argv))), language)


class AutopsySession:
    """Session that watches nothing and explains only the exception that ends the program."""

    def __init__(self) -> None:
        """Start without an exception."""
        self._evidence = Evidence()

    def start(self) -> None:
        """Do nothing: an autopsy installs nothing."""

    def stop(self) -> None:
        """Do nothing, as nothing was installed."""

    def examine(self, error: BaseException) -> None:
        """Collect evidence for an exception that has ended the program or a thread, while its frames exist."""
        found = _evidence(error)
        known = self._evidence
        self._evidence = Evidence((*known.conflicts, *found.conflicts), (*known.failures, *found.failures))

    def report(self, program: Program) -> Report:
        """Return the report of the collected evidence."""
        return report_of(self._evidence, program)


def report_of(evidence: Evidence, program: Program) -> Report:
    """Return the report of an autopsy's evidence."""
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
    """Return the evidence behind an error; empty in a process that has not imported torch."""
    if sys.modules.get("torch") is None:
        return Evidence()
    from gradsan.postmortem import unwatched

    return unwatched.evidence_of(error)
