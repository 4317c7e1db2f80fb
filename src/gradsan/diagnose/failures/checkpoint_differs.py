"""GS502: checkpoint ran a function again for backward, and it did something else than in forward."""

from __future__ import annotations

from gradsan.diagnose.failures import parts, statements
from gradsan.model import Diagnosis, Failure, Message

ROWS = (
    "checkpoint_metadata",
    "checkpoint_count",
)
CODE = "GS502"
SLUG = "checkpoint_differs"


def match(failure: Failure) -> Diagnosis | None:
    """Every such failure."""
    function = parts.clue(failure, "checkpointed")
    name = function.name if function is not None and function.name else Message("label.unnamed_function")
    return statements.stopped(
        failure,
        CODE,
        SLUG,
        role="used",
        explanation=f"explanation.{failure.row}",
        values={"function": name},
        between=parts.label_of(function, "note", "label.checkpointed", {"function": name}),
        fixes=lambda values: (
            parts.fix("pure_function", "preserved", values),
            parts.fix("without_checkpoint", "preserved", values),
        ),
        notes=(Message("note.more_operations_are_silent"),),
    )
