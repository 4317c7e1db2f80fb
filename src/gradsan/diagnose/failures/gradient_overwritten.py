"""GS213: a hook, or the backward of a Function, writes into a gradient that another branch is given, too."""

from __future__ import annotations

from gradsan.diagnose import labels as label_room
from gradsan.diagnose.failures import parts
from gradsan.model import Diagnosis, Failure, Message, NamedTensor

CODE = "GS213"
SLUG = "gradient_overwritten"
ROWS = (SLUG,)


def match(failure: Failure) -> Diagnosis | None:
    """Every such failure: a warning where another branch still needs the gradient, else a note."""
    gradient, branching, sibling = (parts.clue(failure, role) for role in ("gradient", "branching", "sibling"))
    if gradient is None:
        return None
    facts = gradient.values
    values = {
        "name": gradient.name,
        "writer": label_room.as_written(gradient.op),
        "op": parts.op_of(branching),
        "sibling": None if sibling is None else sibling.name,
    }
    is_shared = bool(failure.values.get("shared"))
    variant = "" if is_shared else "_alone"
    is_named = is_shared and branching is not None and bool(values["sibling"])
    return parts.diagnosis(
        failure,
        CODE,
        SLUG,
        values=values,
        severity="warning" if is_shared else "note",
        title=f"title.{SLUG}{variant}",
        explanation=f"explanation.{SLUG}{'_by' if is_named else variant}",
        labels=(
            *parts.label_of(branching, "note", "label.gradient_branches", values),
            *label_room.at("used", failure.site, Message("label.hands_gradients", values)),
            *parts.label_of(gradient, "written", f"label.gradient_written{'_by' if is_named else variant}", values),
        ),
        tensor=NamedTensor(gradient.name, facts["shape"], facts["dtype"], facts["device"], None, None),
        fixes=(parts.fix("return_new_gradient", "changed" if is_shared else "preserved", values),),
    )
