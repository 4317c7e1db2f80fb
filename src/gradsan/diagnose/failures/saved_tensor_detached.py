"""GS311: ``detach_()`` on a tensor that an operation had saved."""

from __future__ import annotations

from gradsan.diagnose.failures import parts, statements
from gradsan.model import Diagnosis, Failure

ROWS = ("saved_detached",)
CODE = "GS311"
SLUG = "saved_tensor_detached"


def match(failure: Failure) -> Diagnosis | None:
    """Every such failure."""
    detached = tuple(
        label
        for clue in parts.clues(failure, "detached")
        for label in parts.label_of(clue, "written", "label.detached_in_place", {})
    )
    return statements.stopped(
        failure,
        CODE,
        SLUG,
        role="used",
        between=detached,
        fixes=lambda values: (parts.fix("detach_out_of_place", "preserved", values),),
    )
