"""Exception notes of the Python API: a short diagnosis on the error."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Literal

from gradsan._imports import imports_by
from gradsan.model import Diagnosis, Message, Report


def annotate(error: BaseException, report: Report, language: Literal["en", "zh", "auto"]) -> None:
    """Add a note to ``error``, once, if it is autograd's or gradsan's own.

    The note is the last diagnosis, or the reason why there is none.

    Python 3.10 has no exception notes; there the text is appended to the message.
    """
    annotate_with(error, report.diagnoses, report.seen.blind_spots, language)


def annotate_with(
    error: BaseException,
    diagnoses: Sequence[Diagnosis],
    blind_spots: Sequence[Message],
    language: Literal["en", "zh", "auto"],
) -> None:
    """Add the note, given the diagnoses that may explain ``error`` and the blind spots."""
    from gradsan._errors import GradsanError, HaltError
    from gradsan.catalogue import is_of_autograd

    halted = isinstance(error, HaltError)
    raised = [diagnosis for diagnosis in diagnoses if halted or diagnosis.gradient.status == "raised"]
    unseen = () if diagnoses else tuple(blind_spots)
    if not (raised or unseen) or not (isinstance(error, GradsanError) or is_of_autograd(error)):
        return
    with imports_by():
        from gradsan.present import short_note, unseen_note
        from gradsan.text import choose_language, language_on

        chosen = language_on(sys.stderr, choose_language(language, os.environ))
        note = short_note(raised[-1], chosen) if raised else unseen_note(unseen, chosen)
    if note in getattr(error, "__notes__", ()) or note in str(error):
        return
    if hasattr(error, "add_note"):
        error.add_note(note)
    elif error.args:
        error.args = (f"{error.args[0]}\n{note}", *error.args[1:])
