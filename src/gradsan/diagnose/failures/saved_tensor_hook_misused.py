"""GS501: a pack hook changed the tensor that it was given, or an unpack hook returned no tensor."""

from __future__ import annotations

from gradsan.diagnose.failures import parts, statements
from gradsan.model import Diagnosis, Failure

ROWS = (
    "pack_hook_writes",
    "unpack_hook_result",
)
CODE = "GS501"
SLUG = "saved_tensor_hook_misused"


def match(failure: Failure) -> Diagnosis | None:
    """Every such failure."""
    fix = "clone_in_hook" if failure.row == "pack_hook_writes" else "unpack_a_tensor"
    return statements.stopped(
        failure,
        CODE,
        SLUG,
        role="used",
        label=f"label.{failure.row}",
        explanation=f"explanation.{failure.row}",
        fixes=lambda values: (parts.fix(fix, "preserved", values),),
    )
