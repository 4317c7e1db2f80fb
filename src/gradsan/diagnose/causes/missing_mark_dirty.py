"""GS212: the forward of a custom Function wrote its input in place and did not mark it dirty."""

from __future__ import annotations

from dataclasses import replace

from gradsan.diagnose import build, function_fixes
from gradsan.diagnose import labels as label_room
from gradsan.diagnose.facts import Facts
from gradsan.model import Diagnosis, Message

CODE = "GS212"
SLUG = "missing_mark_dirty"


def match(facts: Facts) -> Diagnosis | None:
    """Recognise that an input overwritten by a Function was used again with the graph it had before."""
    conflict = facts.conflict
    if conflict.way != SLUG:
        return None
    function = conflict.bridge.older if conflict.bridge is not None else "?"
    inner = conflict.save.slot
    values = {"function": function, "name": facts.name, "op": facts.op}
    found = build.diagnosis(
        facts,
        CODE,
        SLUG,
        severity="warning",
        values=values,
        labels=(
            *label_room.at("note", conflict.alias_site, Message("label.given_to_function", values)),
            *label_room.written(facts, facts.writes),
            *label_room.at(
                "saved", conflict.save.site, Message("label.used_with_old_graph", values), op=conflict.save.node
            ),
            *label_room.at("used", conflict.use.site, Message("label.old_graph_walked", values), op=conflict.use.via),
        ),
        fixes=function_fixes.for_unmarked(facts),
    )
    return replace(
        found, tensor=None if found.tensor is None else replace(found.tensor, name=inner or found.tensor.name)
    )
