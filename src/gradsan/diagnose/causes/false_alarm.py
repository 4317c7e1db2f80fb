"""GS120: the version counter moved, and no byte that was saved has changed."""

from __future__ import annotations

from dataclasses import replace

from gradsan.diagnose import build, fixes
from gradsan.diagnose import labels as label_room
from gradsan.diagnose.facts import Facts
from gradsan.model import Diagnosis, Message

CODE = "GS120"
SLUG = "false_alarm"


def match(facts: Facts) -> Diagnosis | None:
    """Recognise that every logged write missed the saved bytes, or changed only shape and strides."""
    if not facts.is_false_alarm:
        return None
    shape_only = all(write.kind == "metadata" for write in facts.missed)
    key = "note.only_shape_changed" if shape_only else "note.other_bytes_written"
    if facts.is_restored:
        key = "note.same_bytes_again"
    found = build.diagnosis(
        facts,
        CODE,
        SLUG,
        # The program was stopped all the same, so to its user this is an error until the alarm is out of the way.
        severity="error" if facts.conflict.raised else "note",
        labels=label_room.standard(facts, writes=facts.missed),
        fixes=fixes.instead_of_overwriting(facts, copy_first=True),
        explanation=f"{SLUG}_restored" if facts.is_restored else None,
        notes=(Message(key, {"name": facts.name}),),
    )
    return replace(found, title=Message(f"title.{SLUG}_restored", found.title.values)) if facts.is_restored else found
