"""GS217: fully_shard gathered for backward what an update had changed since the forward."""

from __future__ import annotations

from gradsan.diagnose import build, fixes
from gradsan.diagnose import labels as label_room
from gradsan.diagnose.facts import Facts
from gradsan.model import Diagnosis, Message

CODE = "GS217"
SLUG = "gathered_anew"


def match(facts: Facts) -> Diagnosis | None:
    """Recognise a sharded parameter that was written between the forward and the gathering for its backward."""
    if facts.conflict.way != SLUG:
        return None
    updates = facts.updates
    writer = label_room.update_name(facts, updates[0]) if updates else Message("label.some_writer")
    values = {"name": facts.name, "op": facts.op}
    return build.diagnosis(
        facts,
        CODE,
        SLUG,
        values={"update": writer},
        labels=label_room.standard(facts, used=Message("label.used_as_gathered", values)),
        fixes=(*fixes.reorder_step(facts), *fixes.recompute_forward(facts)) if updates else (),
    )
