"""GS211: a custom Function kept a tensor as an attribute of ctx, and it was written before backward."""

from __future__ import annotations

from dataclasses import replace

from gradsan import source
from gradsan.diagnose import build, function_fixes
from gradsan.diagnose import labels as label_room
from gradsan.diagnose.facts import Facts
from gradsan.model import Diagnosis, Label, Message, Site

CODE = "GS211"
SLUG = "context_attribute"


def match(facts: Facts) -> Diagnosis | None:
    """Recognise that what was written hung on ctx, where nobody checks versions."""
    conflict = facts.conflict
    if conflict.way != SLUG:
        return None
    kept = f"ctx.{conflict.save.slot}"
    values = {"function": facts.op, "attribute": kept, "name": facts.name}
    written = label_room.written(facts, facts.writes)
    site = conflict.function_site
    definition = site.frames[-1] if site is not None and site.frames else None
    attribute = (conflict.save.slot or "").partition(".")[0]
    assigned = source.kept_on_context(definition, attribute) if definition is not None else None
    where = (
        ()
        if assigned is None
        else (Label("note", assigned, Message("label.kept_here", values), None, Site((assigned,))),)
    )
    found = build.diagnosis(
        facts,
        CODE,
        SLUG,
        severity="note" if facts.is_false_alarm else "error",
        values=values,
        labels=(
            *label_room.at(
                "saved", conflict.save.site, Message("label.kept_on_context", values), op=conflict.save.node
            ),
            *where,
            *written,
            *label_room.at("used", conflict.use.site, Message("label.context_read", values), op=conflict.use.via),
        ),
        fixes=function_fixes.for_context(facts),
    )
    return replace(found, tensor=None if found.tensor is None else replace(found.tensor, name=kept))
