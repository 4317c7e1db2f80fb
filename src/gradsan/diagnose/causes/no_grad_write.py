"""GS215: a value of the graph was changed where autograd does not record, and then used on."""

from __future__ import annotations

from gradsan import source
from gradsan.diagnose import build, value_fixes
from gradsan.diagnose import labels as label_room
from gradsan.diagnose.facts import Facts
from gradsan.diagnose.levels import place
from gradsan.model import Diagnosis, Message

CODE = "GS215"
SLUG = "no_grad_write"


def match(facts: Facts) -> Diagnosis | None:
    """Recognise that an operation was given the new value with the graph of the old one."""
    conflict = facts.conflict
    if conflict.way != SLUG or facts.first is None:
        return None
    write = facts.first
    name = _made_as(facts) or facts.name
    values = {"name": name, "op": facts.op, "writer": label_room.as_written(write.op)}
    recorded = "no_grad" if not write.grad_enabled else "alias"
    is_open = recorded == "no_grad" and conflict.compared is None
    found = build.diagnosis(
        facts,
        CODE,
        SLUG,
        severity="warning",
        values=values,
        explanation=f"{SLUG}.{recorded}",
        labels=(
            *label_room.at("note", conflict.alias_site, Message("label.computed_here", values)),
            *label_room.changed_value(
                facts,
                values,
                written=f"label.not_recorded.{recorded}",
                saved="label.changed_value_used",
                used="label.old_function",
            ),
        ),
        fixes=value_fixes.for_unrecorded(facts, name),
        notes=(Message("note.may_be_unchanged", {"name": name}),) if is_open else (),
    )
    return build.about(found, name)


def _made_as(facts: Facts) -> str | None:
    """What the statement calls it that computed the value."""
    frame = place(facts.conflict.alias_site) if facts.conflict.alias_site is not None else None
    statement = source.statement_at(frame) if frame is not None else None
    names = source.assigned_names(statement) if statement is not None else []
    return names[0] if len(names) == 1 else None
