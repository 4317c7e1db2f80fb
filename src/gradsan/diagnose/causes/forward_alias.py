"""GS216: a module's forward, or another function, changed a tensor of its caller's, who then read it again."""

from __future__ import annotations

from gradsan import source
from gradsan.diagnose import build, value_fixes
from gradsan.diagnose import labels as label_room
from gradsan.diagnose.facts import Facts
from gradsan.diagnose.levels import inner_frames, place
from gradsan.model import Diagnosis

CODE = "GS216"
SLUG = "forward_alias"


def match(facts: Facts) -> Diagnosis | None:
    """Recognise that an argument was overwritten in a call and read outside of it."""
    conflict = facts.conflict
    if conflict.way != SLUG or facts.first is None:
        return None
    write = facts.first
    frame = place(write.site)
    inner = None if frame is None else source.written_expression(frame, write.op, inner_frames(write.site))
    name = conflict.names[0].text if conflict.names else facts.name
    values = {
        "name": name,
        "argument": inner or name,
        "function": "forward" if frame is None else frame.function,
        "op": facts.op,
        "writer": label_room.as_written(write.op),
    }
    found = build.diagnosis(
        facts,
        CODE,
        SLUG,
        severity="warning",
        values=values,
        labels=label_room.changed_value(
            facts,
            values,
            written="label.argument_written",
            saved="label.argument_read_again",
            used="label.new_value_used",
        ),
        fixes=value_fixes.for_argument(facts, values),
    )
    return build.about(found, name)
