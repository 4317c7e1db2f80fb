"""Memory that is handed out of PyTorch as a copy: what is written there then reaches no saved value."""

from __future__ import annotations

import ast

from gradsan.model import Diagnosis, Fix, Label
from gradsan.repair.fixes import _blocks as blocks
from gradsan.source.change import Edit, changed_lines, edited
from gradsan.source.locate import expressions_at

_PRIMARY = (ast.Name, ast.Attribute, ast.Subscript, ast.Call)


def suggest(diagnosis: Diagnosis) -> tuple[Fix, ...]:
    """``.clone()`` behind what ``x.numpy()``, ``np.asarray(x)`` or ``to_dlpack(x)`` takes its memory from."""
    if diagnosis.cause != "memory_alias":
        return ()
    lines: list[tuple[str, int, str]] = []
    for label in blocks.labels(diagnosis, "written"):
        changed = _copied(label)
        if not changed:
            return ()
        lines += changed
    name = diagnosis.tensor.name if diagnosis.tensor is not None else None
    return (blocks.fix("clone_before_mutation", tuple(dict.fromkeys(lines)), "copy_handed_out", name=name or "?"),)


def _copied(label: Label) -> tuple[tuple[str, int, str], ...]:
    calls = [place for place in expressions_at(label.frame) if isinstance(place.node, ast.Call)]
    if len(calls) != 1 or not isinstance(calls[0].node, ast.Call):
        return ()
    source, call = calls[0].source, calls[0].node
    is_method = isinstance(call.func, ast.Attribute) and not call.args
    value = call.func.value if is_method and isinstance(call.func, ast.Attribute) else next(iter(call.args), None)
    if not isinstance(value, _PRIMARY):
        return ()
    span = source.span(value)
    change = edited(source, [Edit.insert(span.end_line, span.end_column, ".clone()")], "clone_before")
    return () if change is None else changed_lines(label.frame.file, change)
