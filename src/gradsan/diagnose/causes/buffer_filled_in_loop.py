"""GS104: one tensor is filled by indexed writes, and slices of it were saved in between."""

from __future__ import annotations

from gradsan import source
from gradsan.diagnose import build, fixes
from gradsan.diagnose import labels as label_room
from gradsan.diagnose.facts import Facts
from gradsan.diagnose.levels import place
from gradsan.model import Diagnosis, Message, Write

CODE = "GS104"
SLUG = "buffer_filled_in_loop"

_INDEXED = {"__setitem__", "index_copy_", "index_put_", "index_add_", "index_fill_", "select_scatter_", "scatter_"}


def match(facts: Facts) -> Diagnosis | None:
    """Recognise indexed writes, repeated or in a loop, into the tensor of which a part was saved."""
    writes = facts.writes or facts.missed
    if not writes or not all(write.op in _INDEXED for write in writes) or facts.conflict.unexplained:
        return None
    first = writes[0]
    if not _saved_a_part(facts, first) or not _is_repeated(writes):
        return None
    key = "note.same_bytes_again" if facts.is_restored else "note.false_alarm_here"
    notes = (Message(key, {"name": facts.name}),) if facts.is_false_alarm else ()
    return build.diagnosis(
        facts,
        CODE,
        SLUG,
        labels=label_room.standard(facts, writes=writes),
        fixes=fixes.instead_of_filling(facts),
        notes=notes,
    )


def _saved_a_part(facts: Facts, write: Write) -> bool:
    """Whether the saved tensor is smaller than the tensor that was indexed."""
    region = write.region
    if region is None:
        return False
    saved = facts.conflict.save.tensor.shape
    return _numel(saved) < _numel(region.shape)


def _is_repeated(writes: tuple[Write, ...]) -> bool:
    lines = [(frame.file, frame.line) for write in writes if (frame := place(write.site)) is not None]
    if len(set(lines)) < len(lines):
        return True
    frame = place(writes[0].site)
    statement = source.statement_at(frame) if frame is not None else None
    return statement is not None and bool(statement.loops)


def _numel(shape: tuple[int, ...]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total
