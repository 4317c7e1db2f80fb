"""One stretch of watching, from start to report."""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING

from gradsan import __version__
from gradsan._terms import Mode, Terms
from gradsan.model import Evidence, Program, Report

if TYPE_CHECKING:
    from gradsan.capture.recorder import Mark, Recorder

__all__ = ["Mode", "Session", "Terms"]


class Session:
    """Watches from :meth:`start` to :meth:`stop` and reports what happened between. Importing it imports no torch."""

    def __init__(self, mode: Mode = "watch", *, native: bool | None = None, terms: Terms | None = None) -> None:
        """``native`` chooses the hot path: True the C extension, False pure Python, None the best there is.

        ``terms`` is what is asked for beyond being told; they may need a stronger ``mode``.
        """
        self._terms = terms if terms is not None else Terms()
        self.mode: Mode = self._terms.mode(mode)
        self._native = native
        self._recorder: Recorder | None = None
        self._since: Mark | None = None
        self._evidence: Evidence | None = None

    @property
    def is_on(self) -> bool:
        """Whether this session is watching."""
        return self._recorder is not None and self._evidence is None

    def start(self) -> None:
        """Begin to watch. Raises ImportError where torch is not installed."""
        if self.is_on:
            return
        from gradsan.capture.recorder import recorder

        self._recorder = recorder(self._native)
        self._evidence = None
        self._since = self._recorder.mark()
        self._recorder.start(self.mode, self._terms.asked())

    def meet(self, error: BaseException) -> None:
        """Look at an exception that has ended the program or is leaving the watched block; nothing where not on."""
        if self._recorder is not None and self.is_on:
            self._recorder.meet(error)

    def stop(self) -> None:
        """End watching; torch is as it was before."""
        if self._recorder is None or self._evidence is not None:
            return
        self._recorder.stop()
        self._evidence = self._recorder.evidence(self._since)
        self._recorder.let_go()

    def evidence(self) -> Evidence:
        """What was captured so far, as plain data."""
        if self._evidence is not None:
            return self._evidence
        return self._recorder.evidence(self._since) if self._recorder else Evidence()

    def report(self, program: Program | None = None) -> Report:
        """The diagnoses of what was captured so far."""
        import torch

        from gradsan.diagnose import diagnose, strictly

        evidence = self.evidence()
        diagnoses = diagnose(evidence)
        return Report(
            program=program or Program(),
            seen=evidence.seen,
            diagnoses=strictly(diagnoses) if self._terms.strict else diagnoses,
            gradsan=__version__,
            torch=str(torch.__version__),
            python=platform.python_version(),
            mode=self.mode,
        )
