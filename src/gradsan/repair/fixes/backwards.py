"""Earlier backward: the call moved before the statements that overwrite its saved values.

The usual shape: weights are swapped, merged or pruned for an evaluation between the loss and its backward. The
write cannot be delayed, since code in between reads it; the backward can run first, as nothing in between is
computed from gradients.
"""

from __future__ import annotations

import ast

from gradsan.model import Diagnosis, Fix
from gradsan.repair.fixes import _blocks as blocks
from gradsan.source.rewrite.moving import is_whole_lines, names_bound, names_read

_LEAVING = (ast.Return, ast.Continue, ast.Break, ast.Raise, ast.Yield, ast.YieldFrom, ast.Await)
_OF_GRADIENTS = frozenset({"backward", "grad", "step", "unscale_", "update"})


def backward_first(diagnosis: Diagnosis) -> tuple[Fix, ...]:
    """Call the backward, and the ``zero_grad()`` in between, before the first statement that writes.

    Only where nothing simpler preserves the training: a copy, or a new tensor instead of the write.
    """
    if any(fix.lines and fix.meaning == "preserved" for fix in diagnosis.fixes):
        return ()
    used, written = blocks.first(diagnosis, "used"), blocks.labels(diagnosis, "written")
    # The intention of a silent write is unknown.
    is_conflict = diagnosis.severity == "error" and not diagnosis.silent and diagnosis.cause not in blocks.STEPPED
    pairs = blocks.each_in_one_block(written, used) if used is not None and is_conflict else []
    if not pairs or any(pair[1].statement is not pairs[0][1].statement for pair in pairs):
        return ()
    first, backward = min((pair[0] for pair in pairs), key=lambda place: place.index), pairs[0][1]
    source, between = backward.source, backward.block[first.index : backward.index]
    clearing = [node for node in between if blocks.method_call(node, "zero_grad") is not None]
    staying = [node for node in between if node not in clearing]
    moved = [*clearing, backward.statement]
    attributes = _attributes(staying, ast.Store) & _attributes(moved, ast.Load)
    if not staying or not isinstance(backward.statement, ast.Expr):
        return ()
    if attributes or names_bound(staying) & names_read(moved):
        return ()
    if any(isinstance(one, _LEAVING) or _is_of_gradients(one) for node in staying for one in ast.walk(node)):
        return ()
    if not all(is_whole_lines(source, node) for node in (first.statement, *moved)):
        return ()
    away = {line: text for node in moved for line, text in blocks.removed(source, node).items()}
    start = source.span(first.statement).line
    texts = [*(blocks.text_of(source, node) for node in moved), source.lines[start - 1]]
    return (
        blocks.fix("reorder_update", blocks.lines_changed(source, {**away, start: "\n".join(texts)}), "backward_first"),
    )


def _attributes(nodes: list[ast.stmt], context: type[ast.expr_context]) -> set[str]:
    """The attributes, as written, that ``nodes`` bind or read."""
    parts = (one for node in nodes for one in ast.walk(node) if isinstance(one, ast.Attribute))
    return {ast.unparse(one) for one in parts if isinstance(one.ctx, context)}


def _is_of_gradients(node: ast.AST) -> bool:
    """Whether a part of a statement reads, computes, or acts on gradients."""
    return isinstance(node, ast.Attribute) and node.attr in _OF_GRADIENTS
