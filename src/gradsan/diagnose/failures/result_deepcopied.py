"""GS319: ``copy.deepcopy`` met a tensor that is the result of an operation."""

from __future__ import annotations

from gradsan.diagnose.failures import parts, statements
from gradsan.model import Diagnosis, Failure

ROWS = ("deepcopy_of_result",)
CODE = "GS319"
SLUG = "result_deepcopied"


def match(failure: Failure) -> Diagnosis | None:
    """Every such failure."""
    return statements.stopped(
        failure,
        CODE,
        SLUG,
        role="used",
        fixes=lambda values: (parts.fix("detach_and_clone", "changed", values, summary="help.detach_before_copy"),),
    )
