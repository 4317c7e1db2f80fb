"""A refresh of buffers, statistics or a batch that waits until the backward that needs the old values is over."""

from __future__ import annotations

import ast

from gradsan.model import Diagnosis, Fix, Label
from gradsan.repair.fixes import _blocks as blocks
from gradsan.source.rewrite.moving import move_behind

_CAUSES = frozenset({"statistics_updated", "input_changed_between_passes"})
_BY_HAND = frozenset({"data_attribute", *blocks.STEPPED})


def suggest(diagnosis: Diagnosis) -> tuple[Fix, ...]:
    """Move the statements that wrote behind the backward, and all between them that they belong to.

    Whether what is computed in between was to see the new values, a run shows.
    """
    used = next(iter(blocks.labels(diagnosis, "used")), None)
    written = blocks.labels(diagnosis, "written")
    if used is None or not written or diagnosis.cause not in _CAUSES | _BY_HAND:
        return ()
    moved = move_behind([blocks.user_frames(one) for one in written], blocks.user_frames(used))
    if moved is not None:
        return (blocks.fix("reorder_update", moved.lines),)
    return _writers_alone(written, used) if diagnosis.cause in _CAUSES else ()


def _writers_alone(written: tuple[Label, ...], used: Label) -> tuple[Fix, ...]:
    """Only the statements that wrote, where they give no name a value."""
    moved: dict[ast.stmt, blocks.Placed] = {}
    backward = None
    for label in written:
        pair = blocks.in_one_block(label, used)
        if pair is None or pair[0].index >= pair[1].index or not _may_move(pair[0]):
            return ()
        if backward is not None and backward.statement is not pair[1].statement:
            return ()
        moved[pair[0].statement], backward = pair
    if backward is None or not blocks.is_whole_lines(backward.source, backward.statement):
        return ()
    source = backward.source
    end = source.span(backward.statement).end_line
    behind = "\n".join([source.lines[end - 1], *(blocks.text_of(source, node) for node in moved)])
    away = {line: text for node in moved for line, text in blocks.removed(source, node).items()}
    return (blocks.fix("reorder_update", blocks.lines_changed(source, {**away, end: behind})),)


def _may_move(place: blocks.Placed) -> bool:
    """Whether the statement does something and binds nothing: a call, or a ``with`` or a loop around such calls."""
    node = place.statement
    is_backward = any(isinstance(one, ast.Attribute) and one.attr in ("backward", "grad") for one in ast.walk(node))
    if is_backward or blocks.constructs(place.source, node) or not blocks.is_whole_lines(place.source, node):
        return False
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Call)
    if not isinstance(node, ast.For | ast.With):
        return False
    # A loop's own variables are read by what it runs, and by nobody else as a rule; a round more tells.
    return all(isinstance(one, ast.Expr | ast.AugAssign) for one in node.body)
