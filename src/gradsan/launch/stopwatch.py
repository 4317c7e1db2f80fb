"""Time that a program was watched for."""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import datetime

from gradsan.model import Program


class Stopwatch:
    """Begins to run when it is made."""

    def __init__(self) -> None:
        """Begin."""
        self._began_at = time.time()
        self._began = time.perf_counter()

    def on(self, program: Program) -> Program:
        """``program`` with when this began, as the clock on the wall showed it, and the seconds since."""
        started = datetime.fromtimestamp(self._began_at).astimezone().isoformat(timespec="seconds")
        return replace(program, started=started, seconds=max(round(time.perf_counter() - self._began, 3), 0.0))
