"""Changed lines around calls of ``backward``: one call for several losses, and a graph kept for a second one."""

from __future__ import annotations

import ast

from gradsan.model import Frame
from gradsan.source.chains import chain_key
from gradsan.source.change import Change, Edit, edited
from gradsan.source.keywords import add_keyword
from gradsan.source.locate import Expression, expression_at, statement_at
from gradsan.source.rounds import in_same_function
from gradsan.source.tree import SourceFile, header_nodes

__all__ = ["backward_of_sum", "keep_graph"]

_TOUCHING_GRADIENTS = frozenset({"zero_grad", "step", "backward", "clip_grad_norm_", "clip_grad_value_", "grad"})


def backward_of_sum(first: Frame, second: Frame) -> tuple[tuple[str, int, str], ...]:
    """``Fix.lines`` that join ``a.backward()`` and ``b.backward()``, two lines of one block, in ``(a + b).backward()``.

    Empty where the calls have arguments, or anything between them reads or changes gradients.
    """
    calls = [expression_at(first), expression_at(second)]
    losses = [None if call is None else _plain_loss(call) for call in calls]
    if not in_same_function(first, second) or None in losses or losses[0] == losses[1]:
        return ()
    one, other = statement_at(first), statement_at(second)
    if one is None or other is None or one.span.line == other.span.line:
        return ()
    source = one.source
    between = _between(source, one.node, other.node)
    if between is None or any(_touches_gradients(node) for node in between):
        return ()
    if one.span.line != one.span.end_line or other.span.line != other.span.end_line:
        return ()
    change = edited(source, [Edit(other.span, f"({losses[0]} + {losses[1]}).backward()")], "sum_losses")
    is_alone = source.lines[one.span.line - 1].strip() == one.text
    if change is None or not is_alone:
        return ()
    return (first.file, one.span.line, ""), (second.file, other.span.line, change.new)


def keep_graph(frame: Frame) -> Change | None:
    """The line of ``frame``, a call of ``backward`` or ``grad``, with ``retain_graph=True``; None where it names it."""
    return add_keyword(frame, "retain_graph", "True")


def _plain_loss(call: Expression) -> str | None:
    node = call.node
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or node.func.attr != "backward":
        return None
    is_plain = not node.args and not node.keywords and isinstance(call.statement, ast.Expr)
    return chain_key(node.func.value) if is_plain else None


def _between(source: SourceFile, one: ast.stmt, other: ast.stmt) -> list[ast.stmt] | None:
    """The statements between two of one block; None where they stand in different blocks."""
    if one not in source.parents or other not in source.parents or source.parents[one] != source.parents[other]:
        return None
    parent, name = source.parents[one]
    block = getattr(parent, name)
    return list(block[block.index(one) + 1 : block.index(other)]) if one in block and other in block else None


def _touches_gradients(statement: ast.stmt) -> bool:
    if hasattr(statement, "body"):
        return True
    return any(isinstance(node, ast.Attribute) and node.attr in _TOUCHING_GRADIENTS for node in header_nodes(statement))
