"""GS312: a tensor made in inference mode was written, saved or marked where autograd records."""

from __future__ import annotations

from gradsan.diagnose.failures import parts, statements
from gradsan.model import Diagnosis, Failure

ROWS = (
    "inference_written",
    "inference_saved",
    "inference_requires_grad",
    "inference_version",
)
CODE = "GS312"
SLUG = "inference_tensor_used"


def match(failure: Failure) -> Diagnosis | None:
    """Every such failure."""
    return statements.stopped(
        failure,
        CODE,
        SLUG,
        role="written" if failure.row == "inference_written" else "used",
        label=f"label.{failure.row}",
        explanation=f"explanation.{failure.row}",
        fixes=lambda values: (
            parts.fix("clone_inference_tensor", "preserved", values),
            parts.fix("no_grad_not_inference", "preserved", values),
        ),
    )
