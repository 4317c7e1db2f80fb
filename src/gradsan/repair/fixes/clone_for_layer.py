"""A copy for a layer that works in place: what it is called with stays as autograd has saved it."""

from __future__ import annotations

import ast

from gradsan.model import Diagnosis, Fix, Label
from gradsan.repair.fixes import _blocks as blocks
from gradsan.source.change import Edit, changed_lines, edited
from gradsan.source.locate import expressions_at

_PRIMARY = (ast.Name, ast.Attribute, ast.Subscript, ast.Call)


def suggest(diagnosis: Diagnosis) -> tuple[Fix, ...]:
    """Where the user's code calls the layer or the function with one tensor, ``.clone()`` behind that tensor."""
    if diagnosis.cause != "inplace_module":
        return ()
    lines: list[tuple[str, int, str]] = []
    for label in blocks.labels(diagnosis, "written"):
        changed = _copied(label)
        if not changed:
            return ()
        lines += changed
    name = diagnosis.tensor.name if diagnosis.tensor is not None else None
    return (blocks.fix("clone_before_mutation", tuple(dict.fromkeys(lines)), "clone_for_layer", name=name or "?"),)


def _copied(label: Label) -> tuple[tuple[str, int, str], ...]:
    calls = [place for place in expressions_at(label.frame) if isinstance(place.node, ast.Call)]
    if len(calls) != 1 or not isinstance(calls[0].node, ast.Call) or not calls[0].node.args:
        return ()
    source, value = calls[0].source, calls[0].node.args[0]
    if isinstance(value, ast.Starred):
        return ()
    span = source.span(value)
    edits = [Edit.insert(span.end_line, span.end_column, ".clone()")]
    if not isinstance(value, _PRIMARY):
        edits = [
            Edit.insert(span.line, span.column, "("),
            Edit.insert(span.end_line, span.end_column, ").clone()"),
        ]
    change = edited(source, edits, "clone_before")
    return () if change is None else changed_lines(label.frame.file, change)
