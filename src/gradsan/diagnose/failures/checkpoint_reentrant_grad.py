"""GS503: reentrant checkpoint met a backward that asks for certain gradients only."""

from __future__ import annotations

from gradsan.diagnose.failures import parts, statements
from gradsan.model import Diagnosis, Failure

ROWS = ("checkpoint_reentrant_grad",)
CODE = "GS503"
SLUG = "checkpoint_reentrant_grad"


def match(failure: Failure) -> Diagnosis | None:
    """Every such failure."""
    return statements.stopped(
        failure,
        CODE,
        SLUG,
        role="used",
        fixes=lambda values: (parts.fix("not_reentrant", "preserved", values),),
    )
