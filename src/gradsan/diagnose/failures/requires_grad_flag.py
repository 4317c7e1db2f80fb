"""GS318: ``requires_grad`` was set where it cannot be."""

from __future__ import annotations

from gradsan.diagnose.failures import parts, statements
from gradsan.model import Diagnosis, Failure

ROWS = (
    "flag_of_result",
    "flag_of_integer",
)
CODE = "GS318"
SLUG = "requires_grad_flag"


def match(failure: Failure) -> Diagnosis | None:
    """Every such failure."""
    is_result = failure.row == "flag_of_result"
    return statements.stopped(
        failure,
        CODE,
        SLUG,
        role="used",
        explanation=f"explanation.{failure.row}",
        fixes=lambda values: (
            parts.fix(
                "detach_result" if is_result else "floating_first", "changed" if is_result else "preserved", values
            ),
        ),
    )
