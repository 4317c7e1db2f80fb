"""The name that a program gives to what one call made, also where functions hand it on to their callers."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import replace

from gradsan.model import Frame
from gradsan.source.chains import chain_key
from gradsan.source.locate import expression_at, statement_at
from gradsan.source.names import bindings_of

__all__ = ["bound_name", "method_receiver"]


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


def method_receiver(frame: Frame) -> str | None:
    """``loss`` of ``loss.backward()`` at ``frame``; None where it is no method call of something with a name."""
    found = expression_at(frame)
    call = found.node if found is not None else None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
        return None
    return chain_key(call.func.value)
