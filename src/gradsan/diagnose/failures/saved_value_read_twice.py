"""GS509: a custom backward read its saved tensors a second time where they are handed out once."""

from __future__ import annotations

from gradsan import source
from gradsan.diagnose.failures import parts, statements
from gradsan.model import Diagnosis, Failure, Message

ROWS = ("saved_read_twice", "checkpoint_unpacked_twice")
CODE = "GS509"
SLUG = "saved_value_read_twice"


def match(failure: Failure) -> Diagnosis | None:
    """Every such failure; with the first reading where the same function shows it."""
    function = parts.clue(failure, "definition")
    values = {"function": function.name if function is not None else Message("label.a_function")}
    own = failure.site.user_frame
    reads = () if own is None else source.earlier_reads(own, "saved_tensors")
    return statements.stopped(
        failure,
        CODE,
        SLUG,
        role="used",
        explanation=f"explanation.{failure.row}",
        values=values,
        between=(
            *parts.label_of(parts.clue(failure, "node"), "created", "label.forward_of_function", values),
            *parts.label_of(parts.clue(failure, "rerun"), "note", "label.backward_began", values),
            *(label for read in reads for label in statements.at_frame("freed", read, Message("label.read_first"))),
        ),
        fixes=lambda _: (parts.fix("read_once", "preserved", values),),
    )
