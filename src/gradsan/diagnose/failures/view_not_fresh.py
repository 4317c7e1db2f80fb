"""GS320: a ``__torch_dispatch__`` answered a view operation with a tensor that cannot become a view."""

from __future__ import annotations

from gradsan.diagnose.failures import parts, statements
from gradsan.model import Diagnosis, Failure

ROWS = ("view_same_as_base", "view_with_history")
CODE = "GS320"
SLUG = "view_not_fresh"


def match(failure: Failure) -> Diagnosis | None:
    """Every such failure; with the class that took the operation over, where a variable knows it."""
    dispatcher = parts.clue(failure, "dispatcher")
    values = {} if dispatcher is None else {"class": dispatcher.name}
    return statements.stopped(
        failure,
        CODE,
        SLUG,
        role="used",
        explanation=f"explanation.{failure.row}",
        between=parts.label_of(dispatcher, "note", "label.dispatcher", values),
        fixes=lambda filled: (parts.fix("fresh_view", "preserved", filled),),
    )
