"""GS304: a view is used after its base was written, and it is one that cannot follow."""

from __future__ import annotations

from gradsan.diagnose import labels as label_room
from gradsan.diagnose.failures import parts, statements
from gradsan.model import Diagnosis, Failure, Message

ROWS = (
    "multi_view_base_written",
    "unrecorded_view_base_written",
)
CODE = "GS304"
SLUG = "view_base_written"


def match(failure: Failure) -> Diagnosis | None:
    """Every such failure."""
    writes = tuple(
        label
        for clue in parts.clues(failure, "base_written")
        for label in parts.label_of(clue, "written", "label.base_written", {"op": label_room.as_written(clue.op)})
    )
    is_recorded = failure.row == "multi_view_base_written"
    return statements.stopped(
        failure,
        CODE,
        SLUG,
        role="used",
        label="label.stale_view_used",
        explanation=f"explanation.view_base_written_{'several' if is_recorded else 'unrecorded'}",
        between=writes,
        fixes=lambda values: (
            parts.fix("out_of_place", "preserved", values, summary="help.base_out_of_place"),
            parts.fix("view_after_write", "changed", values),
        ),
        notes=(Message("note.hides_version_error"),) if is_recorded else (),
    )
