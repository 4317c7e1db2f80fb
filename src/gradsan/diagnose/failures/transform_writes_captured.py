"""GS507: a function under torch.func.grad (vjp, jvp) writes a tensor from outside."""

from __future__ import annotations

from gradsan.diagnose.failures import parts, statements
from gradsan.model import Diagnosis, Failure

ROWS = ("transform_writes_captured",)
CODE = "GS507"
SLUG = "transform_writes_captured"


def match(failure: Failure) -> Diagnosis | None:
    """Every such failure."""
    return statements.stopped(
        failure,
        CODE,
        SLUG,
        role="written",
        fixes=lambda values: (parts.fix("pass_and_return", "preserved", values),),
    )
