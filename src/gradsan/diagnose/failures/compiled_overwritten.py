"""GS505: torch.compile met, while it built the backward, a saved value that is overwritten."""

from __future__ import annotations

from gradsan.diagnose.failures import parts, statements
from gradsan.model import Diagnosis, Failure, Message

ROWS = ("compiled_version_error",)
CODE = "GS505"
SLUG = "compiled_overwritten"


def match(failure: Failure) -> Diagnosis | None:
    """Every such failure."""
    return statements.stopped(
        failure,
        CODE,
        SLUG,
        role="used",
        fixes=lambda values: (parts.fix("run_uncompiled", "preserved", values),),
        notes=(Message("note.compile_does_not_repair"),),
    )
