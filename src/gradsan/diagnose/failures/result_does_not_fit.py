"""GS316: the result of an in-place operation has another dtype or a larger shape than the written tensor."""

from __future__ import annotations

from gradsan.diagnose.failures import statements
from gradsan.model import Diagnosis, Failure

ROWS = (
    "result_dtype",
    "result_shape",
)
CODE = "GS316"
SLUG = "result_does_not_fit"


def match(failure: Failure) -> Diagnosis | None:
    """Every such failure."""
    return statements.stopped(
        failure,
        CODE,
        SLUG,
        explanation=f"explanation.{failure.row}",
        fixes=lambda values: statements.new_tensor(failure, values)[:1],
    )
