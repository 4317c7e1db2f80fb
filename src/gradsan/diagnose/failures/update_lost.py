"""GS218: leaves were updated past their graph by gradients that were taken to be differentiated, and never were."""

from __future__ import annotations

from gradsan.diagnose import labels as label_room
from gradsan.diagnose.failures import parts
from gradsan.model import Clue, Diagnosis, Failure, Message, NamedTensor

CODE = "GS218"
SLUG = "update_not_differentiated"
ROWS = (SLUG,)


def match(failure: Failure) -> Diagnosis | None:
    """Every such failure whose leaf has a name: a warning where it is an inner step by all signs, else a note."""
    asked, updated = parts.clue(failure, "asked"), parts.clue(failure, "updated")
    if asked is None or updated is None or not updated.name:
        return None
    values = {
        "name": updated.name,
        "writer": _writer(updated),
        "others": updated.values["leaves"] - 1,
    }
    return parts.diagnosis(
        failure,
        CODE,
        SLUG,
        values=values,
        severity="warning" if failure.values.get("is_strong") else "note",
        labels=(
            *parts.label_of(asked, "note", "label.differentiable_gradient", values),
            *parts.label_of(updated, "written", "label.updated_past_graph", values),
            *label_room.at("used", failure.site, Message("label.begins_at_new_values", values)),
        ),
        tensor=_tensor_of(updated),
        fixes=(
            parts.fix("functional_fast_weights", "changed", values),
            parts.fix("leave_create_graph", "preserved", values),
        ),
        notes=(Message("note.more_leaves_updated", values),) if values["others"] else (),
    )


def _writer(updated: Clue) -> str:
    return f"{updated.name}.data = ..." if updated.op == "data =" else label_room.as_written(updated.op)


def _tensor_of(updated: Clue) -> NamedTensor:
    facts = updated.values
    return NamedTensor(updated.name, facts["shape"], facts["dtype"], facts["device"], None, None)
