"""GS307: what a custom Function declares with ``mark_dirty`` is not what it returns."""

from __future__ import annotations

from gradsan.diagnose.failures import parts, statements
from gradsan.model import Diagnosis, Failure

ROWS = (
    "dirty_not_returned",
    "dirty_view_of_several",
)
CODE = "GS307"
SLUG = "mark_dirty_misused"


def match(failure: Failure) -> Diagnosis | None:
    """Every such failure."""
    is_view = failure.row == "dirty_view_of_several"
    return statements.stopped(
        failure,
        CODE,
        SLUG,
        explanation=f"explanation.{failure.row}",
        fixes=lambda values: (
            parts.fix(
                "clone_before_mutation" if is_view else "return_dirty",
                "preserved",
                values,
                summary="help.clone_input" if is_view else None,
            ),
        ),
    )
