"""The name that a program gives to what one call made, also where functions hand it on to their callers."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import replace

from gradsan.model import Frame
from gradsan.source.chains import chain_key
from gradsan.source.inplace import ALIASING_ATTRIBUTES, ALIASING_METHODS, PIECES, is_inplace_name
from gradsan.source.locate import expression_at, expressions_at, statement_at
from gradsan.source.names import bindings_of

__all__ = ["binds_result", "bound_name", "method_receiver", "takes_result"]


def bound_name(frames: Sequence[Frame]) -> tuple[str, Frame] | None:
    """The name bound to the result of the call at the innermost of ``frames`` (outermost first), and where.

    ``feats`` of ``feats = F.silu(x)``; of ``return F.silu(x)`` what the caller binds. None where the result is used up
    within an expression, and where the source does not tell.
    """
    for frame in reversed(frames):
        found, statement = expression_at(frame), statement_at(frame)
        if found is None or statement is None:
            return None
        if isinstance(statement.node, ast.Return) and statement.node.value is found.node:
            continue
        names = [one.name for one in bindings_of(statement.node) if one.value is found.node]
        if len(names) != 1:
            return None
        span = statement.span
        place = replace(frame, line=span.line, column=span.column, end_line=span.end_line, end_column=span.end_column)
        return names[0], place
    return None


def binds_result(frame: Frame) -> bool:
    """Whether the statement at ``frame`` binds what the operation there gives, or a view of it, and computes no more.

    True as well where the statement takes the result apart, since then the source does not tell.
    """
    statement = statement_at(frame)
    if statement is None:
        return False
    operations = {place.node for place in expressions_at(frame)}
    values = [one.value for one in bindings_of(statement.node)]
    return (
        any(value is None for value in values)
        or any(part in operations for value in values if value is not None for part in _same_memory(value))
        or statement.node in operations
    )


def takes_result(frame: Frame) -> bool:
    """Whether the call at ``frame`` is more than a statement of its own, so that somebody takes what it returns."""
    call, statement = expression_at(frame), statement_at(frame)
    if call is None or statement is None or not isinstance(call.node, ast.Call):
        return False
    return not (isinstance(statement.node, ast.Expr) and statement.node.value is call.node)


def _same_memory(value: ast.expr) -> Iterator[ast.expr]:
    """``value``, and what it is a view of or writes to, step by step."""
    yield value
    if isinstance(value, ast.IfExp):
        yield from _same_memory(value.body)
        yield from _same_memory(value.orelse)
        return
    part: ast.expr | None = None
    if isinstance(value, ast.NamedExpr | ast.Subscript | ast.Attribute):
        is_same = not isinstance(value, ast.Attribute) or value.attr in ALIASING_ATTRIBUTES
        part = value.value if is_same else None
    elif isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
        name = value.func.attr
        part = value.func.value if name in ALIASING_METHODS | PIECES or is_inplace_name(name) else None
    if part is not None:
        yield from _same_memory(part)


def method_receiver(frame: Frame) -> str | None:
    """``loss`` of ``loss.backward()`` at ``frame``; None where it is no method call of something with a name."""
    found = expression_at(frame)
    call = found.node if found is not None else None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
        return None
    return chain_key(call.func.value)
