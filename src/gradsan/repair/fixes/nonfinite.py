"""NaN and Inf: batches skipped, rows of data dropped, and an optimizer's eps.

Changes of the operation itself are in the diagnosis already (``source/rewrite/finite.py``).
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from gradsan.model import Diagnosis, Fix, Label
from gradsan.repair.fixes import _blocks as blocks
from gradsan.source.change import Change, Edit, changed_lines, edited, indentation_of
from gradsan.source.identifiers import leaf_name
from gradsan.source.imports import torch_name
from gradsan.source.locate import Statement, statement_at
from gradsan.source.rewrite.numerics.reductions import nothing_to_average
from gradsan.source.tree import SourceFile


def leave_out_empty(diagnosis: Diagnosis) -> tuple[Fix, ...]:
    """``continue`` where the reduction has nothing to reduce, in the loop that runs backward."""
    origin = _origin(diagnosis, "empty") or _origin(diagnosis, "too_few")
    statement = None if origin is None else statement_at(origin.frame)
    condition = None if origin is None else nothing_to_average(origin.frame)
    if statement is None or condition is None or not _is_in_training_loop(diagnosis, statement):
        return ()
    return _lines("leave_out_empty", statement.source, _continue_before(statement.source, statement.node, condition))


def clean_data(diagnosis: Diagnosis) -> tuple[Fix, ...]:
    """Drop the nonfinite rows where a round's batch is unpacked, or skip the batch."""
    origin = _origin(diagnosis, "given")
    loop = None if origin is None else _training_loop(diagnosis)
    name = diagnosis.title.values.get("name")
    if loop is None or not isinstance(name, str):
        return ()
    source, node = loop
    found: list[Fix] = []
    torch = torch_name(source)
    for names, following in _unpacked(node):
        if name not in names:
            continue
        kept = blocks.fresh_name(source, "known")
        rows = [
            f"{kept} = {torch}.isfinite({name}).reshape(len({name}), -1).all(1)",
            f"{', '.join(names)} = {', '.join(f'{one}[{kept}]' for one in names)}",
        ]
        found += _lines("drop_rows", source, _before(source, following, rows), name=name)
        condition = f"not {torch}.isfinite({name}).all()"
        found += _lines("leave_out_batch", source, _continue_before(source, following, condition), name=name)
        break
    return tuple(found)


def positive_eps(diagnosis: Diagnosis) -> tuple[Fix, ...]:
    """An eps above 0 where a file of the stacks makes an optimizer of the class that divided 0 by 0."""
    origin = _origin(diagnosis, "eps_zero")
    if origin is None:
        return ()
    lines = blocks.lines_in_files(diagnosis, lambda source: _with_eps(source, (origin.op or "").partition(".")[0]))
    return (blocks.fix("positive_eps", lines),) if lines else ()


def _with_eps(source: SourceFile, name: str) -> Change | None:
    edits = [
        Edit(source.span(keyword.value), "1e-8")
        for call in source.nodes
        if isinstance(call, ast.Call) and leaf_name(call.func) == name
        for keyword in call.keywords
        if keyword.arg == "eps" and isinstance(keyword.value, ast.Constant) and keyword.value.value == 0
    ]
    return edited(source, edits, "positive_eps")


def _origin(diagnosis: Diagnosis, reason: str) -> Label | None:
    """The label of the operation whose value was not finite for ``reason``."""
    if diagnosis.why is None or diagnosis.why.text.key != f"why.nonfinite_{reason}":
        return None
    return blocks.first(diagnosis, "origin")


def _training_loop(diagnosis: Diagnosis) -> tuple[SourceFile, ast.For | ast.AsyncFor | ast.While] | None:
    """The innermost loop around the backward that was affected first."""
    for label in blocks.labels(diagnosis, "noticed"):
        statement = statement_at(label.frame)
        if statement is not None and statement.loops:
            return statement.source, statement.loops[-1]
    return None


def _is_in_training_loop(diagnosis: Diagnosis, statement: Statement) -> bool:
    loop = _training_loop(diagnosis)
    return loop is not None and bool(statement.loops) and statement.loops[-1] is loop[1]


def _unpacked(loop: ast.For | ast.AsyncFor | ast.While) -> Iterator[tuple[list[str], ast.stmt]]:
    """The names that a round's batch is bound to, and the statement before which they may be rebound."""
    if isinstance(loop, ast.For | ast.AsyncFor) and loop.body:
        names = _names(loop.target)
        if names:
            yield names, loop.body[0]
    for statement, following in zip(loop.body, loop.body[1:], strict=False):
        if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
            names = _names(statement.targets[0])
            if names:
                yield names, following


def _names(target: ast.expr) -> list[str]:
    parts = target.elts if isinstance(target, ast.Tuple | ast.List) else [target]
    names = [part.id for part in parts if isinstance(part, ast.Name)]
    if len(names) == len(parts):
        return names
    # ``for step, (x, y) in enumerate(loader)``: the batch is the tuple.
    inner = [part for part in parts if isinstance(part, ast.Tuple)]
    return _names(inner[0]) if len(inner) == 1 else []


def _continue_before(source: SourceFile, statement: ast.stmt, condition: str) -> Change | None:
    return _before(source, statement, [f"if {condition}:", f"{indentation_of(source)}continue"])


def _before(source: SourceFile, statement: ast.stmt, rows: list[str]) -> Change | None:
    """``rows`` right before ``statement``, which must be alone on its line."""
    span = source.span(statement)
    head = source.indent(span)
    if head.strip():
        return None
    return Change(span.line, "", "\n".join(f"{head}{row}" for row in rows), "before")


def _lines(kind: str, source: SourceFile, change: Change | None, **values: str) -> tuple[Fix, ...]:
    lines = changed_lines(source.file, change)
    return (blocks.fix(kind, lines, **values),) if lines else ()
