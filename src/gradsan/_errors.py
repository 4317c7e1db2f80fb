"""Errors that gradsan raises itself: on request, or where the process would crash otherwise."""

from __future__ import annotations

import os

from gradsan.model import Message


class GradsanError(RuntimeError):
    """Base class of the errors that gradsan raises in the watched program."""

    def __init__(self, message: Message) -> None:
        """Word ``message`` in the language of the environment."""
        # Most programs meet none of these errors, and need no words.
        from gradsan.text import choose_language, say

        super().__init__(say(message, choose_language("auto", os.environ)))


class HaltError(GradsanError):
    """Stop at the first error found, as requested by ``halt=True`` or ``--halt``, raised where it was found."""


class HealingEndedError(GradsanError):
    """The originals kept for healing need more memory than ``max_bytes``."""


class MemoryFreedError(GradsanError):
    """Backward asked for a saved value whose memory was taken away; PyTorch would crash the process here."""


for _one in (GradsanError, HaltError, HealingEndedError, MemoryFreedError):
    # The public name in tracebacks and pickles.
    _one.__module__ = "gradsan"
