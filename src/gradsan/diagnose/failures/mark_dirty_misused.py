"""GS307: what a custom Function declares with ``mark_dirty`` is not what it returns."""

from __future__ import annotations

from gradsan.diagnose.failures import parts, statements
from gradsan.model import Diagnosis, Failure, Message

ROWS = (
    "dirty_not_input",
    "dirty_not_returned",
    "dirty_view_of_several",
)
CODE = "GS307"
SLUG = "mark_dirty_misused"


def match(failure: Failure) -> Diagnosis | None:
    """Every such failure."""
    if failure.row == "dirty_not_input":
        return _needless(failure)
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


def _needless(failure: Failure) -> Diagnosis:
    """PyTorch only warns of a tensor that was no input."""
    function = parts.clue(failure, "definition")
    values = {"function": function.name if function is not None else Message("label.a_function")}
    return statements.stopped(
        failure,
        CODE,
        SLUG,
        role="used",
        title=f"title.{failure.row}",
        explanation=f"explanation.{failure.row}",
        values=values,
        between=parts.label_of(function, "note", "label.forward_defined", values),
        fixes=lambda _: (parts.fix("drop_mark_dirty", "preserved", values),),
        severity="warning",
    )
