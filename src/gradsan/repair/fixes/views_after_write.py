"""A base that is written before its views are made: they then come from what they would have followed to."""

from __future__ import annotations

import ast

from gradsan.model import Diagnosis, Fix
from gradsan.repair.fixes import _blocks as blocks
from gradsan.source.change import Change
from gradsan.source.locate import statement_at
from gradsan.source.rewrite.out_of_place import out_of_place


def suggest(diagnosis: Diagnosis) -> tuple[Fix, ...]:
    """Make the views behind the write; the same with a write out of place; and only that, unseen by the views."""
    made = next(iter(blocks.labels(diagnosis, "created")), None)
    written = blocks.labels(diagnosis, "written")
    if diagnosis.cause != "view_base_written" or len(written) != 1:
        return ()
    frame = written[0].frame
    statement = statement_at(frame)
    new = None if statement is None else out_of_place(frame, written[0].op or "")
    pair = None if made is None else blocks.in_one_block(made, written[0])
    found: list[Fix] = []
    if pair is not None and _may_swap(*pair):
        found.append(_moved(*pair, None))
        if new is not None:
            found.append(_moved(*pair, new))
    if new is not None and statement is not None:
        gone = dict.fromkeys(range(new.line + 1, new.line + len(new.old.split("\n"))), "")
        lines = blocks.lines_changed(statement.source, {**gone, new.line: new.new})
        found.append(blocks.fix("out_of_place", lines, "base_out_of_place"))
    return tuple(found)


def _may_swap(made: blocks.Placed, written: blocks.Placed) -> bool:
    """Whether the views can be made later: nothing in between reads them, or binds what they are made of."""
    if made.index >= written.index or not isinstance(made.statement, ast.Assign):
        return False
    if not all(blocks.is_whole_lines(place.source, place.statement) for place in (made, written)):
        return False
    between = made.block[made.index + 1 : written.index + 1]
    bound = {name for node in between for name in blocks.names_bound(node)}
    views, base = blocks.names_bound(made.statement), blocks.names_read([made.statement])
    return not (blocks.names_read(between) & views) and not (bound & (views | base))


def _moved(made: blocks.Placed, written: blocks.Placed, new: Change | None) -> Fix:
    source, span = made.source, made.source.span(written.statement)
    text = blocks.text_of(source, written.statement)
    if new is not None:
        text = new.new
    changes = {
        **blocks.removed(source, made.statement),
        **dict.fromkeys(range(span.line, span.end_line + 1), ""),
        span.line: f"{text}\n{blocks.text_of(source, made.statement)}",
    }
    lines = blocks.lines_changed(source, changes)
    return blocks.fix("view_after_write", lines) if new is None else blocks.fix("out_of_place", lines, "base_first")
