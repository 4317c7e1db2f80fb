"""GS210: a checkpointed function found something else when it was run again in backward."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from gradsan import source
from gradsan.diagnose import build, function_fixes
from gradsan.diagnose import labels as label_room
from gradsan.diagnose.facts import Facts
from gradsan.diagnose.levels import place
from gradsan.model import Diagnosis, Label, Message, Site

CODE = "GS210"
SLUG = "checkpoint_closure"


def match(facts: Facts) -> Diagnosis | None:
    """Recognise that what a checkpointed function reaches was written or bound anew before its recomputation."""
    conflict = facts.conflict
    if conflict.way != SLUG:
        return None
    path = conflict.save.slot
    before, now = conflict.rebound or ("?", "?")
    values = {"function": _called(facts), "name": facts.name if path else "?", "before": before, "now": now}
    kind = "_unknown" if path is None else "_rebound" if conflict.rebound is not None else ""
    found = build.diagnosis(
        facts,
        CODE,
        SLUG,
        severity="note" if conflict.unchanged else "error" if conflict.certain else "warning",
        values=values,
        labels=_labels(facts, values),
        fixes=function_fixes.for_checkpoint(facts),
        notes=(Message("note.recomputed_the_same"),) if conflict.unchanged else (),
    )
    return replace(
        found,
        title=Message(f"title.{SLUG}{kind}", found.title.values),
        explanation=Message(f"explanation.{SLUG}{kind}", found.title.values),
        # A checkpoint keeps no such thing: that it is not kept is the point.
        tensor=None if path is None or found.tensor is None else replace(found.tensor, op=None, operand=None),
    )


def _called(facts: Facts) -> str | Message:
    name = facts.conflict.save.node or "?"
    return Message("label.checkpointed_lambda") if name.endswith("<lambda>") else name


def _labels(facts: Facts, values: dict[str, Any]) -> tuple[Label, ...]:
    conflict = facts.conflict
    call, use = place(conflict.save.site), place(conflict.use.site)
    changed = label_room.written(facts, facts.writes)
    if conflict.rebound is not None and call is not None and conflict.save.slot is not None:
        places = source.rebound_at(call, conflict.save.slot, use)
        message = Message("label.rebound", values)
        for frame in places:
            role = "written" if len(places) == 1 else "suspect"
            changed += (Label(role, frame, message, "=", Site((frame,))),)  # type: ignore[arg-type]
    return (
        *label_room.at("saved", conflict.save.site, Message("label.checkpoint_call", values), op="checkpoint"),
        *changed,
        *label_room.at("used", conflict.use.site, Message("label.recomputed", values), op=conflict.use.via),
    )
