"""Session: one stretch of watching, from start to report."""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from gradsan import __version__
from gradsan._collector import CollectorPaused
from gradsan._terms import Mode, Terms
from gradsan.launch import watched_process
from gradsan.model import Conflict, Diagnosis, Evidence, Failure, Message, Program, Report, Seen

if TYPE_CHECKING:
    from gradsan.record.recorder import Mark, Recorder


OLDEST_TORCH = (2, 6)


def too_old() -> Message | None:
    """Return the message for a PyTorch older than ``OLDEST_TORCH``; None if it is not, or not imported yet."""
    version = str(getattr(sys.modules.get("torch"), "__version__", ""))
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None or (int(found[1]), int(found[2])) >= OLDEST_TORCH:
        return None
    return Message("blind.torch_too_old", {"version": version, "oldest": ".".join(map(str, OLDEST_TORCH))})


class Session:
    """Watches from :meth:`start` to :meth:`stop` and reports the findings. Importing it imports no torch."""

    def __init__(self, mode: Mode = "watch", *, native: bool | None = None, terms: Terms | None = None) -> None:
        """Choose the core by ``native``: True for the C extension, False for pure Python, None for the best there is.

        ``terms`` are demands beyond a report; they may need a stronger ``mode``.
        """
        self._terms = terms if terms is not None else Terms()
        self.mode: Mode = self._terms.mode(mode)
        self._native = native
        self._recorder: Recorder | None = None
        self._since: Mark | None = None
        self._stretch = 0
        self._evidence: Evidence | None = None
        self._forks = self._forks_end = 0
        self._explainer: Callable[[BaseException, Conflict | Failure | None], None] | None = None
        self.on_finding: Callable[[Conflict | Failure], None] | None = None
        """Called with each new finding; set before :meth:`start`."""
        self.problems: tuple[Message, ...] = ()
        """Problems of gradsan with this torch, known after the start."""

    @property
    def is_on(self) -> bool:
        """Whether this session is watching."""
        return self._recorder is not None and self._evidence is None

    @property
    def core(self) -> str | None:
        """The core in use, ``C`` or ``Python``; None before the first start."""
        return None if self._recorder is None else "C" if self._recorder.core.is_native else "Python"

    def start(self) -> None:
        """Begin watching. If torch is too old, nothing is watched, and :attr:`problems` says so.

        Raises:
            ImportError: if torch is not installed.
        """
        if self.is_on:
            return
        import torch  # noqa: F401

        unsupported = too_old()
        if unsupported is not None:
            self.problems = (unsupported,)
            return
        # This makes modules, classes and wrappers, no garbage; collections would go through torch's objects, too.
        with CollectorPaused():
            from gradsan.record.recorder import recorder

            self._forks = watched_process.forks()
            self._recorder = recorder(self._native)
            self._evidence = None
            self._since = self._recorder.mark()
            if self.on_finding is not None:
                self._recorder.on_findings += (self.on_finding,)
            self._stretch = self._recorder.start(self.mode, self._terms.asked())
        self.problems = tuple(self._recorder.watching.problems or ())

    def examine(self, error: BaseException) -> Failure | None:
        """Examine an exception that has ended the program or is leaving the watched block; does nothing if not on.

        Returns the Failure behind it, if it is new.
        """
        return self._recorder.examine(error) if self._recorder is not None and self.is_on else None

    def call_with_errors(self, listener: Callable[[BaseException, Conflict | Failure | None], None]) -> None:
        """Call ``listener`` with each error that leaves a backward and the finding for it, until the stop."""
        self._explainer = listener
        if self._recorder is not None:
            self._recorder.explainers += (listener,)

    def stop(self) -> None:
        """End watching and restore torch."""
        if self._recorder is None or self._evidence is not None:
            return
        self._forks_end = watched_process.forks()
        self._recorder.stop(self._stretch)
        self._recorder.on_findings = tuple(one for one in self._recorder.on_findings if one != self.on_finding)
        self._recorder.explainers = tuple(one for one in self._recorder.explainers if one != self._explainer)
        self._evidence = self._recorder.evidence(self._since)
        self._recorder.let_go()

    def _forks_since(self) -> int:
        """Return how many children forked in this stretch send no report."""
        return (watched_process.forks() if self.is_on else self._forks_end) - self._forks

    def begin_anew(self) -> None:
        """Start counting anew in a forked child: earlier findings and counts belong to the parent."""
        if self._recorder is not None and self.is_on:
            self._recorder.after_fork()
            self._since = self._recorder.mark()

    def evidence(self) -> Evidence:
        """Return everything recorded so far, as plain data."""
        if self._evidence is not None:
            return self._evidence
        if self._recorder is None:
            return Evidence(seen=Seen(blind_spots=self.problems))
        return self._recorder.evidence(self._since)

    def report(self, program: Program | None = None) -> Report:
        """Return a report with the diagnoses of everything recorded so far."""
        import torch

        evidence = self.evidence()
        diagnoses: tuple[Diagnosis, ...] = ()
        if evidence.conflicts or evidence.failures or evidence.nonfinite:
            # A right program needs no explanation, and the package is a large one.
            from gradsan.diagnose import diagnose, strictly

            diagnoses = diagnose(evidence)
            diagnoses = strictly(diagnoses) if self._terms.strict else diagnoses
        seen, forks = evidence.seen, self._forks_since()
        if forks:
            spot = Message("processes.forked", {"count": forks})
            seen = replace(seen, blind_spots=(*seen.blind_spots, spot))
        return Report(
            program=program or Program(),
            seen=seen,
            diagnoses=diagnoses,
            gradsan=__version__,
            torch=str(torch.__version__),
            python=platform.python_version(),
            mode=self.mode,
        )
