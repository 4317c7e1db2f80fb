"""GS315: an in-place activation whose backward cannot be computed from its result."""

from __future__ import annotations

from gradsan.diagnose.failures import parts, statements
from gradsan.model import Diagnosis, Failure

ROWS = ("negative_slope",)
CODE = "GS315"
SLUG = "negative_slope_in_place"


def match(failure: Failure) -> Diagnosis | None:
    """Every such failure."""
    forward = parts.clue(failure, "forward")
    return statements.stopped(
        failure,
        CODE,
        SLUG,
        role="used",
        between=parts.label_of(forward, "written", "label.activated_in_place", {}),
        fixes=lambda values: (parts.fix("disable_inplace_module", "preserved", values),),
    )
