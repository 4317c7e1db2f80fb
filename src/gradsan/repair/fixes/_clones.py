"""``.clone()`` behind a tensor that a call of the user's takes."""

from __future__ import annotations

import ast
from collections.abc import Callable

from gradsan.model import Diagnosis, Fix, Label
from gradsan.repair.fixes import _blocks as blocks
from gradsan.source.change import Edit, changed_lines, edited
from gradsan.source.locate import expressions_at

_PRIMARY = (ast.Name, ast.Attribute, ast.Subscript, ast.Call)


def clone_what_is_given(
    diagnosis: Diagnosis, key: str, chosen: Callable[[ast.Call], ast.expr | None]
) -> tuple[Fix, ...]:
    """One fix that clones what ``chosen`` takes of each call that has written; none where one has nothing to take."""
    lines: list[tuple[str, int, str]] = []
    for label in blocks.labels(diagnosis, "written"):
        changed = _cloned(label, chosen)
        if not changed:
            return ()
        lines += changed
    name = diagnosis.tensor.name if diagnosis.tensor is not None else None
    return (blocks.fix("clone_before_mutation", tuple(dict.fromkeys(lines)), key, name=name or "?"),)


def _cloned(label: Label, chosen: Callable[[ast.Call], ast.expr | None]) -> tuple[tuple[str, int, str], ...]:
    calls = [place for place in expressions_at(label.frame) if isinstance(place.node, ast.Call)]
    if len(calls) != 1 or not isinstance(calls[0].node, ast.Call):
        return ()
    source, value = calls[0].source, chosen(calls[0].node)
    if value is None or isinstance(value, ast.Starred):
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
