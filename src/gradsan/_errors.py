"""Errors that gradsan raises itself: where it was asked to, or where the process would end otherwise."""

from __future__ import annotations

import os

from gradsan import text
from gradsan.model import Message


class GradsanError(RuntimeError):
    """What the errors have in common that gradsan raises in the program it watches."""

    def __init__(self, message: Message) -> None:
        """``message`` is said in the language of the environment."""
        super().__init__(text.say(message, text.choose_language("auto", os.environ)))


class HaltError(GradsanError):
    """The program asked gradsan to stop at the first conflict (``halt=True``, ``--halt``), and this is where it was."""


class HealingEndedError(GradsanError):
    """What healing keeps takes more memory than it was given (``max_bytes``)."""


class MemoryFreedError(GradsanError):
    """Backward asked for a saved value whose memory had been taken away: PyTorch would end the process here."""


for _one in (GradsanError, HaltError, HealingEndedError, MemoryFreedError):
    # As a traceback and a pickle name it: by where it is imported from.
    _one.__module__ = "gradsan"
