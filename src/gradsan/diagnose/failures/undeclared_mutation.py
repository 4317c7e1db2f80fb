"""GS516: a custom operator writes an argument that its schema calls read-only."""

from __future__ import annotations

from gradsan.diagnose import labels as label_room
from gradsan.diagnose.failures import parts, statements
from gradsan.model import Diagnosis, Failure, Message

ROWS = ("undeclared_mutation", "undeclared_mutation_checked")
CODE = "GS516"
SLUG = "undeclared_mutation"


def match(failure: Failure) -> Diagnosis | None:
    """Every such failure; with the operator's definition and its writes where it is Python."""
    operator = parts.clue(failure, "operator")
    values = {
        "op": (operator.name if operator is not None else None) or Message("label.the_operator"),
        "argument": failure.values.get("argument", "?"),
    }
    return statements.stopped(
        failure,
        CODE,
        SLUG,
        role="used",
        label="label.schema_checked",
        values=values,
        between=(
            *parts.label_of(operator, "note", "label.operator_defined", values),
            *(
                label
                for write in parts.clues(failure, "base_written")
                for label in parts.label_of(
                    write,
                    "written",
                    "label.written_in_operator",
                    {**values, "by": label_room.as_written(write.op)},
                )
            ),
        ),
        fixes=lambda _: (
            parts.fix("declare_mutation", "preserved", values),
            parts.fix("clone_in_operator", "preserved", values),
        ),
    )
