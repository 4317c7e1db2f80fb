"""GS314: ``.data`` was set to a tensor that cannot stand in for the old one."""

from __future__ import annotations

from gradsan.diagnose.failures import parts, statements
from gradsan.model import Diagnosis, Failure

ROWS = (
    "data_not_floating",
    "data_incompatible",
)
CODE = "GS314"
SLUG = "data_replaced"


def match(failure: Failure) -> Diagnosis | None:
    """Every such failure."""
    return statements.stopped(
        failure,
        CODE,
        SLUG,
        explanation=f"explanation.{failure.row}",
        fixes=lambda values: (parts.fix("new_parameter", "preserved", values),),
    )
