"""GS513: DistributedDataParallel was given the gradient of one parameter twice in one backward."""

from __future__ import annotations

from gradsan.diagnose import labels as label_room
from gradsan.diagnose.failures import parts
from gradsan.model import Diagnosis, Failure, Message

ROWS = ("ready_twice",)
CODE = "GS513"
SLUG = "gradient_reduced_twice"


def match(failure: Failure) -> Diagnosis | None:
    """Every such failure; with the calls of reentrant checkpoint, where those are why."""
    parameter, calls = parts.clue(failure, "parameter"), parts.clues(failure, "checkpoint_call")
    values = {"name": (parameter.name if parameter is not None else None) or Message("label.a_parameter")}
    fixes = (
        (parts.fix("not_reentrant", "preserved", values), parts.fix("static_graph", "preserved", values))
        if calls
        else (parts.fix("one_backward_a_round", "preserved", values), parts.fix("static_graph", "preserved", values))
    )
    labels = {
        (label.frame.file, label.frame.line, label.frame.column): label
        for call in calls
        for label in parts.label_of(call, "created", "label.reentrant_call", values)
    }
    return parts.diagnosis(
        failure,
        CODE,
        SLUG,
        values=values,
        explanation=f"explanation.{SLUG}{'_by_checkpoint' if calls else ''}",
        labels=(*labels.values(), *label_room.at("used", failure.site, Message(f"label.{SLUG}", values))),
        fixes=fixes,
    )
