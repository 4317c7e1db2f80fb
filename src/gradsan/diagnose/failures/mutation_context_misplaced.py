"""GS511: ``allow_mutation_on_saved_tensors`` was entered twice, or left before the backward."""

from __future__ import annotations

from gradsan.diagnose.failures import parts, statements
from gradsan.model import Diagnosis, Failure, Message

ROWS = ("mutation_contexts_nested", "mutation_context_left")
CODE = "GS511"
SLUG = "mutation_context_misplaced"


def match(failure: Failure) -> Diagnosis | None:
    """Every such failure."""
    return statements.stopped(
        failure,
        CODE,
        SLUG,
        role="used",
        label=f"label.{failure.row}",
        explanation=f"explanation.{failure.row}",
        fixes=lambda values: (parts.fix("one_context", "preserved", values),),
        notes=(Message("note.heal_does_it"),),
    )
