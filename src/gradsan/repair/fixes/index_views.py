"""Views taken one by one: a loop over a tensor, whose views come from one call, takes each by its index instead.

PyTorch does not follow a write through one of several views that a single call made. A view by index is followed.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass

from gradsan.model import Diagnosis, Fix
from gradsan.repair.fixes import _blocks as blocks
from gradsan.source.change import Edit, text_with
from gradsan.source.identifiers import leaf_name
from gradsan.source.locate import statement_at
from gradsan.source.tree import SourceFile

_SAFE_TO_READ_TWICE = (ast.Name, ast.Attribute)


@dataclass(frozen=True, slots=True)
class _Taken:
    """What a loop takes its views from: ``whole``, along ``dimension``; ``index`` is the loop's own count, if any."""

    whole: ast.expr
    dimension: str
    index: str | None = None


def suggest(diagnosis: Diagnosis) -> tuple[Fix, ...]:
    """Where the written view is a loop's variable, bind it anew from its index at the start of every round."""
    written = next(iter(blocks.labels(diagnosis, "written")), None)
    name = diagnosis.tensor.name if diagnosis.tensor is not None else None
    if diagnosis.cause != "one_of_several_views_written" or written is None or not name or not name.isidentifier():
        return ()
    place = statement_at(written.frame)
    for loop in reversed(place.loops if place is not None else ()):
        taken = _taken(loop.target, loop.iter, name) if isinstance(loop, ast.For) else None
        if place is not None and taken is not None and isinstance(loop, ast.For):
            fix = _by_index(place.source, loop, taken, name)
            return () if fix is None else (fix,)
    return ()


def _taken(target: ast.expr, source: ast.expr, name: str) -> _Taken | None:
    if isinstance(target, ast.Name):
        return _whole(source) if target.id == name else None
    if not isinstance(target, ast.Tuple) or not isinstance(source, ast.Call) or source.keywords:
        return None
    function = source.func.id if isinstance(source.func, ast.Name) else ""
    if function == "enumerate" and len(target.elts) == 2 and len(source.args) == 1:
        inner = _taken(target.elts[1], source.args[0], name)
        index = target.elts[0]
        return _Taken(inner.whole, inner.dimension, index.id) if inner and isinstance(index, ast.Name) else None
    if function == "zip" and len(target.elts) == len(source.args):
        found = (_taken(one, value, name) for one, value in zip(target.elts, source.args, strict=True))
        return next((one for one in found if one is not None), None)
    return None


def _whole(value: ast.expr) -> _Taken | None:
    """The tensor that is walked over: itself, or by ``unbind``."""
    if not isinstance(value, ast.Call):
        return _Taken(value, "0") if _is_safe(value) else None
    if leaf_name(value.func) != "unbind" or not isinstance(value.func, ast.Attribute):
        return None
    given = [*value.args, *(keyword.value for keyword in value.keywords if keyword.arg == "dim")]
    is_function = isinstance(value.func.value, ast.Name) and value.func.value.id == "torch"
    whole = given.pop(0) if is_function and given else value.func.value
    if len(given) > 1 or not _is_safe(whole):
        return None
    return _Taken(whole, ast.unparse(given[0]) if given else "0")


def _is_safe(value: ast.expr) -> bool:
    """Whether reading ``value`` again, in every round, reads the same."""
    return isinstance(value, _SAFE_TO_READ_TWICE) and all(
        isinstance(one, ast.Name | ast.Attribute | ast.expr_context) for one in ast.walk(value)
    )


def _by_index(source: SourceFile, loop: ast.For, taken: _Taken, name: str) -> Fix | None:
    body, target, walked = (source.span(node) for node in (loop.body[0], loop.target, loop.iter))
    if walked.end_line >= body.line or source.lines[body.line - 1][: body.column - 1].strip():
        return None
    index = taken.index or blocks.fresh_name(source, "index")
    whole = source.text(taken.whole)
    view = f"{whole}[{index}]" if taken.dimension == "0" else f"{whole}.select({taken.dimension}, {index})"
    indent = source.lines[body.line - 1][: body.column - 1]
    changes = {body.line: f"{indent}{name} = {view}\n{source.lines[body.line - 1]}"}
    if taken.index is None:
        is_several = isinstance(loop.target, ast.Tuple)
        bare = is_several and not source.text(loop.target).startswith("(")
        edits = [
            Edit.insert(target.line, target.column, f"{index}, (" if bare else f"{index}, "),
            *([Edit.insert(target.end_line, target.end_column, ")")] if bare else []),
            Edit.insert(walked.line, walked.column, "enumerate("),
            Edit.insert(walked.end_line, walked.end_column, ")"),
        ]
        whole_lines = type(target)(target.line, 1, walked.end_line, len(source.lines[walked.end_line - 1]) + 1)
        changes |= dict.fromkeys(range(target.line, walked.end_line + 1), "")
        changes[target.line] = text_with(source, whole_lines, edits)
    return blocks.fix("index_base_instead", blocks.lines_changed(source, changes))
