"""A copy of what a call of the user's takes, or gives."""

from __future__ import annotations

import ast
from collections.abc import Callable

from gradsan.model import Frame
from gradsan.source.change import Change, Edit, edited
from gradsan.source.locate import expressions_at

__all__ = ["clone_given", "clone_handed_out"]

_PRIMARY = (ast.Name, ast.Attribute, ast.Subscript, ast.Call)
_OF_TENSORS = frozenset({"numpy", "__array__", "__dlpack__"})
_OF_ARRAYS = frozenset({"from_numpy", "frombuffer", "as_tensor", "asarray"})


def clone_given(frame: Frame, chosen: Callable[[ast.Call], ast.expr | None]) -> Change | None:
    """``.clone()`` behind the part of the call at ``frame`` that is ``chosen``; None where there is no such part."""
    calls = [place for place in expressions_at(frame) if isinstance(place.node, ast.Call)]
    if len(calls) != 1 or not isinstance(calls[0].node, ast.Call):
        return None
    source, value = calls[0].source, chosen(calls[0].node)
    if value is None or isinstance(value, ast.Starred):
        return None
    span = source.span(value)
    edits = [Edit.insert(span.end_line, span.end_column, ".clone()")]
    if not isinstance(value, _PRIMARY):
        edits = [
            Edit.insert(span.line, span.column, "("),
            Edit.insert(span.end_line, span.end_column, ").clone()"),
        ]
    return edited(source, edits, "clone_before")


def clone_handed_out(frame: Frame, door: str) -> Change | None:
    """The call at ``frame`` with memory of its own on the other side: ``x.clone().numpy()``, ``from_numpy(a).clone()``.

    ``door`` is the method or function of PyTorch that shared the memory. None for a bare pointer, which would not keep
    a copy alive.
    """
    if door in _OF_TENSORS:
        return clone_given(frame, _whose_memory)
    return clone_given(frame, lambda call: call) if door in _OF_ARRAYS else None


def _whose_memory(call: ast.Call) -> ast.expr | None:
    if isinstance(call.func, ast.Attribute) and not call.args:
        return call.func.value
    return next(iter(call.args), None)
