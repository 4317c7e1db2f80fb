"""GS308: an expanded tensor, whose elements share memory, was written in place."""

from __future__ import annotations

from gradsan import source
from gradsan.diagnose import labels as label_room
from gradsan.diagnose.failures import parts, statements
from gradsan.model import Diagnosis, Failure, Message, NamedTensor

ROWS = ("memory_overlap",)
CODE = "GS308"
SLUG = "expanded_written"


def match(failure: Failure) -> Diagnosis | None:
    """Every such failure."""
    late = parts.clue(failure, "overlapping_write")
    if late is not None:
        return _found_late(failure)
    return statements.stopped(
        failure,
        CODE,
        SLUG,
        fixes=lambda values: (
            *statements.copy_where_made(failure, values),
            *statements.new_tensor(failure, values)[:1],
        ),
    )


def _found_late(failure: Failure) -> Diagnosis:
    """A write with a mask or an index goes through; it is its backward that finds the shared memory."""
    clues = tuple(clue for clue in parts.clues(failure, "overlapping_write") if clue.site is not None)
    frame = None if clues[-1].site is None else clues[-1].site.user_frame
    written = None if frame is None else source.writing_at(frame)
    name = written.target if written is not None else Message("label.unnamed")
    values = {"name": name, "op": label_room.as_written(clues[-1].op)}
    labels = {
        (label.frame.file, label.frame.line): label
        for clue in clues
        for label in parts.label_of(clue, "written", "label.expanded_written_late", values)
    }
    made = None if frame is None or written is None else source.definition_of(frame, written.target)
    copied = () if frame is None or written is None else statements.copied_where_made(frame, written.target)
    # Backward begins with what was computed last.
    passing = made.elements[clues[-1].values.get("turn", 0) % len(made.elements)] if made and made.elements else None
    key = "label.taken_in_turn" if made is not None and made.is_loop else "label.bound"
    created = (
        ()
        if made is None
        else statements.at_frame("created", made.frame, Message(key, {"name": name, "value": made.value}))
    )
    return parts.diagnosis(
        failure,
        CODE,
        SLUG,
        values=values,
        explanation="explanation.expanded_written_late",
        labels=(*created, *labels.values(), *label_room.at("used", failure.site, Message("label.overlap_found"))),
        tensor=NamedTensor(
            passing or (name if isinstance(name, str) else None),
            clues[-1].values.get("shape", ()),
            clues[-1].values.get("dtype", "?"),
            clues[-1].values.get("device", "cpu"),
            None,
            None,
        ),
        fixes=(
            parts.fix("clone_before_mutation", "preserved", values, lines=copied),
            parts.fix("out_of_place", "preserved", values),
        ),
    )
