"""GS313: ``resize_`` on a tensor that requires grad."""

from __future__ import annotations

from gradsan.diagnose.failures import parts, statements
from gradsan.model import Diagnosis, Failure

ROWS = ("resize_requires_grad",)
CODE = "GS313"
SLUG = "resized_with_grad"


def match(failure: Failure) -> Diagnosis | None:
    """Every such failure."""
    return statements.stopped(
        failure,
        CODE,
        SLUG,
        fixes=lambda values: (parts.fix("slice_or_pad", "preserved", values),),
    )
