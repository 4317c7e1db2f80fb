"""GS506: a custom operator returned its input, or a view of it."""

from __future__ import annotations

from gradsan.diagnose.failures import parts, statements
from gradsan.model import Diagnosis, Failure

ROWS = ("custom_op_aliases",)
CODE = "GS506"
SLUG = "custom_op_aliases"


def match(failure: Failure) -> Diagnosis | None:
    """Every such failure."""
    return statements.stopped(
        failure,
        CODE,
        SLUG,
        role="used",
        fixes=lambda values: (parts.fix("clone_output", "preserved", values),),
    )
