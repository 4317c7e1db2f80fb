"""The short diagnosis that an exception carries in the Python API."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Literal

from gradsan.model import Diagnosis

# How PyTorch's sentence begins whose cause a raised conflict explains.
_VERSION_ERROR = "one of the variables needed for gradient computation"


def annotate(error: BaseException, diagnoses: Sequence[Diagnosis], language: Literal["en", "zh", "auto"]) -> None:
    """Add the last diagnosis as a note to ``error``, once, if it is the error that the diagnosis explains.

    Python 3.10 has no exception notes; there the text goes behind the message.
    """
    raised = [diagnosis for diagnosis in diagnoses if diagnosis.gradient.status == "raised"]
    if not raised or not _is_explained(error):
        return
    from gradsan.present import short_note
    from gradsan.text import choose_language

    note = short_note(raised[-1], choose_language(language, os.environ))
    if note in getattr(error, "__notes__", ()) or note in str(error):
        return
    if hasattr(error, "add_note"):
        error.add_note(note)
    elif error.args:
        error.args = (f"{error.args[0]}\n{note}", *error.args[1:])


def _is_explained(error: BaseException) -> bool:
    """Whether the last raised diagnosis is of this error: the version check's, or one that the catalogue knows."""
    if isinstance(error, RuntimeError) and str(error).startswith(_VERSION_ERROR):
        return True
    from gradsan.catalogue import recognise

    return recognise([kind.__name__ for kind in type(error).__mro__], str(error)) is not None
