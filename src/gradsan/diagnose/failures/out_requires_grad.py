"""GS302: ``out=`` names a tensor, or takes operands, that autograd follows."""

from __future__ import annotations

from gradsan import source
from gradsan.diagnose.failures import parts, statements
from gradsan.model import Diagnosis, Failure

ROWS = ("out_requires_grad",)
CODE = "GS302"
SLUG = "out_requires_grad"


def match(failure: Failure) -> Diagnosis | None:
    """Every such failure."""
    return statements.stopped(
        failure,
        CODE,
        SLUG,
        fixes=lambda values: (
            parts.fix("no_grad", "preserved", values, lines=statements.changed(failure, source.under_no_grad)),
            parts.fix("out_of_place", "preserved", values, summary="help.without_out"),
        ),
    )
