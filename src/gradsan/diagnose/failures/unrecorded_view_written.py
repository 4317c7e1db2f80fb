"""GS305: a view made under no_grad or inference mode is written where autograd records."""

from __future__ import annotations

from gradsan import source
from gradsan.diagnose.failures import parts, statements
from gradsan.model import Diagnosis, Failure

ROWS = ("unrecorded_view_inplace",)
CODE = "GS305"
SLUG = "unrecorded_view_written"


def match(failure: Failure) -> Diagnosis | None:
    """Every such failure."""
    return statements.stopped(
        failure,
        CODE,
        SLUG,
        fixes=lambda values: (
            parts.fix("move_view_out_of_no_grad", "preserved", values),
            parts.fix(
                "no_grad",
                "changed",
                values,
                lines=statements.changed(failure, source.under_no_grad),
                summary="help.write_unrecorded",
            ),
            *statements.new_tensor(failure, values, of_view=True),
        ),
    )
