"""GS514: DistributedDataParallel still waits for gradients of the round before."""

from __future__ import annotations

from gradsan.diagnose import labels as label_room
from gradsan.diagnose.failures import parts
from gradsan.model import Diagnosis, Failure, Label, Message

ROWS = ("reduction_unfinished",)
CODE = "GS514"
SLUG = "reduction_unfinished"


def match(failure: Failure) -> Diagnosis | None:
    """Every such failure; with the parameters' names where the wrapped module was found."""
    parameters = parts.clues(failure, "parameter")
    names = ", ".join(one.name for one in parameters if one.name)
    values = {"name": names or Message("label.some_parameters")}
    owners: dict[tuple[str, int, str], Label] = {}
    for one in parameters:
        for label in parts.label_of(one, "note", "label.left_out", dict(one.values)):
            owners.setdefault((label.frame.file, label.frame.line, str(one.values.get("attribute"))), label)
    return parts.diagnosis(
        failure,
        CODE,
        SLUG,
        values=values,
        labels=(
            *owners.values(),
            *parts.label_of(parts.clue(failure, "past_backward"), "note", "label.ended_without", values),
            *label_room.at("used", failure.site, Message(f"label.{SLUG}", values)),
        ),
        fixes=(
            parts.fix("find_unused_parameters", "preserved", values),
            parts.fix("use_or_remove", "changed", values),
        ),
    )
