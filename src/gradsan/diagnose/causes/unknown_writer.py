"""GS121: the version counter moved, and no write that gradsan logged accounts for it."""

from __future__ import annotations

from gradsan.diagnose import build, fixes, suspects
from gradsan.diagnose import labels as label_room
from gradsan.diagnose.facts import Facts
from gradsan.model import Diagnosis, Message

CODE = "GS121"
SLUG = "unknown_writer"


def match(facts: Facts) -> Diagnosis | None:
    """Take every conflict that no other cause recognised, and rank who may have written."""
    ranked = suspects.rank(facts)
    labels = (
        *label_room.saved(facts),
        *(
            label
            for suspect in ranked
            for label in label_room.at("suspect", suspect.site, Message(suspect.reason, {"name": facts.name}))
        ),
        *label_room.at("used", facts.conflict.use.site, Message("label.used", {"op": facts.op})),
    )
    # Where the save is not known, nothing was looked through that could have shown a writer.
    notes = () if ranked or not facts.conflict.save.site.frames else (Message("note.no_suspect"),)
    return build.diagnosis(
        facts,
        CODE,
        SLUG,
        values={"count": facts.conflict.unexplained},
        labels=labels,
        fixes=fixes.increment_or_name(facts),
        notes=notes,
    )
