"""GS515: torch.compile cannot build a write to its inputs, or to what backward is given."""

from __future__ import annotations

from gradsan.diagnose.failures import parts, statements
from gradsan.model import Diagnosis, Failure

ROWS = ("compiled_inputs_share", "compiled_backward_writes")
CODE = "GS515"
SLUG = "compiled_input_unsupported"


def match(failure: Failure) -> Diagnosis | None:
    """Every such failure."""
    shares = failure.row == "compiled_inputs_share"
    named = "_named" if "one" in failure.values else ""
    return statements.stopped(
        failure,
        CODE,
        SLUG,
        role="used",
        label="label.compiled_overwritten",
        explanation=f"explanation.{failure.row}{named}",
        between=tuple(
            label
            for write in parts.clues(failure, "written")
            for label in parts.label_of(write, "written", "label.input_written", {})
        ),
        fixes=lambda values: (
            parts.fix("separate_inputs" if shares else "new_gradient", "preserved", values),
            parts.fix("outside_of_compile", "preserved", values),
        ),
    )
