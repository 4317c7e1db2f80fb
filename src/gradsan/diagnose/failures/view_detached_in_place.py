"""GS310: ``detach_()`` on a view."""

from __future__ import annotations

from gradsan.diagnose.failures import parts, statements
from gradsan.model import Diagnosis, Failure

ROWS = ("view_detached",)
CODE = "GS310"
SLUG = "view_detached_in_place"


def match(failure: Failure) -> Diagnosis | None:
    """Every such failure."""
    return statements.stopped(
        failure,
        CODE,
        SLUG,
        fixes=lambda values: (
            parts.fix("detach_out_of_place", "preserved", values),
            parts.fix("zero_grad_to_none", "preserved", values),
        ),
    )
