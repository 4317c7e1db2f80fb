"""GS214: the gradient of a leaf is never cleared, and every backward adds to what is left of the rounds before."""

from __future__ import annotations

from gradsan.diagnose import labels as label_room
from gradsan.diagnose.failures import parts
from gradsan.model import Clue, Diagnosis, Failure, Fix, Message, NamedTensor

CODE = "GS214"
SLUG = "gradient_never_cleared"
ROWS = (SLUG,)


def match(failure: Failure) -> Diagnosis | None:
    """Every such failure that has a leaf with a name."""
    leaf, updated = parts.clue(failure, "gradient"), parts.clue(failure, "updated")
    if leaf is None or updated is None or not leaf.name:
        return None
    by_step = bool(updated.op and updated.op.endswith(".step"))
    values = {
        "name": f"{leaf.name}.grad",
        "leaf": leaf.name,
        "rounds": leaf.values["rounds"],
        "others": leaf.values["leaves"] - 1,
        "writer": _writer(leaf.name, updated.op or "?"),
    }
    return parts.diagnosis(
        failure,
        CODE,
        SLUG,
        values=values,
        severity="warning",
        labels=(
            *label_room.at("used", failure.site, Message("label.adds_to_gradient", values)),
            *parts.label_of(updated, "written", "label.updated_by_gradient", values),
        ),
        tensor=_gradient_of(leaf),
        fixes=_fixes(by_step, values),
        notes=(Message("note.more_gradients_kept", values),) if values["others"] else (),
    )


def _writer(name: str, op: str) -> str:
    return f"{name}.data = ..." if op == "data =" else label_room.as_written(op)


def _fixes(by_step: bool, values: dict[str, object]) -> tuple[Fix, ...]:
    clear = parts.fix("clear_by_optimizer" if by_step else "clear_gradient", "changed", values)
    return (clear,) if by_step else (clear, parts.fix("ask_for_gradient", "changed", values))


def _gradient_of(leaf: Clue) -> NamedTensor:
    facts = leaf.values
    return NamedTensor(f"{leaf.name}.grad", facts["shape"], facts["dtype"], facts["device"], None, None)
