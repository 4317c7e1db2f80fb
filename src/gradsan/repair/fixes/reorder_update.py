"""A refresh of buffers, statistics or a batch that waits until the backward that needs the old values is over."""

from __future__ import annotations

import ast

from gradsan.model import Diagnosis, Fix
from gradsan.repair.fixes import _blocks as blocks

_CAUSES = frozenset({"statistics_updated", "input_changed_between_passes"})


def suggest(diagnosis: Diagnosis) -> tuple[Fix, ...]:
    """Move the statements that wrote behind the backward, where they give no name a value and stand in its block.

    Whether what is computed in between was to see the new values, a run shows.
    """
    used = next(iter(blocks.labels(diagnosis, "used")), None)
    written = blocks.labels(diagnosis, "written")
    if used is None or not written or diagnosis.cause not in _CAUSES:
        return ()
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
    is_backward = any(isinstance(one, ast.Attribute) and one.attr == "backward" for one in ast.walk(node))
    if is_backward or blocks.constructs(place.source, node) or not blocks.is_whole_lines(place.source, node):
        return False
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Call)
    if not isinstance(node, ast.For | ast.With):
        return False
    # A loop's own variables are read by what it runs, and by nobody else as a rule; a round more tells.
    return all(isinstance(one, ast.Expr | ast.AugAssign) for one in node.body)
