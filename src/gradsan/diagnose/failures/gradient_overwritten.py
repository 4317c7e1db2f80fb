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
        "writer": next(iter(label_room.as_written([gradient.op or "?"])), gradient.op),
        "op": parts.op_of(branching),
        "sibling": sibling.name if sibling is not None and sibling.name else Message("label.other_branch"),
    }
    is_shared = bool(failure.values.get("shared"))
    variant = "" if is_shared else "_alone"
    explained = "_by" if is_shared and branching is not None else variant
    return parts.diagnosis(
        failure,
        CODE,
        SLUG,
        values=values,
        severity="warning" if is_shared else "note",
        title=f"title.{SLUG}{variant}",
        explanation=f"explanation.{SLUG}{explained}",
        labels=(
            *parts.label_of(branching, "note", "label.gradient_branches", values),
            *label_room.at("used", failure.site, Message("label.hands_gradients", values)),
            *parts.label_of(gradient, "written", f"label.gradient_written{variant}", values),
        ),
        tensor=NamedTensor(gradient.name, facts["shape"], facts["dtype"], facts["device"], None, None),
        fixes=(parts.fix("return_new_gradient", "changed" if is_shared else "preserved", values),),
    )
