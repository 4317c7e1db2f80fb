"""Which ``with`` (or decorator) a frame stands inside, told by the name of what it enters."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import replace

from gradsan.model import Frame
from gradsan.source.chains import leaf_name
from gradsan.source.locate import statement_at
from gradsan.source.tree import SourceFile

__all__ = ["context_around"]


def context_around(frames: Sequence[Frame], names: frozenset[str]) -> tuple[Frame, str] | None:
    """The innermost context around what ``frames`` (outermost first) execute whose last name is one of ``names``.

    Its place, the expression that makes it, and that name. A ``with`` whose header is executed counts as entered, a
    decorator as around its whole function. None where there is none, and where the source cannot be read.
    """
    for frame in reversed(frames):
        statement = statement_at(frame)
        if statement is None:
            continue
        for node in _entered(statement.source, statement.node):
            name = leaf_name(node.func if isinstance(node, ast.Call) else node)
            if name in names:
                span = statement.source.span(node)
                at = replace(
                    frame, line=span.line, column=span.column, end_line=span.end_line, end_column=span.end_column
                )
                return at, name or ""
    return None


def _entered(source: SourceFile, statement: ast.stmt) -> Iterator[ast.expr]:
    """What is entered around a statement within its function, innermost first."""
    if isinstance(statement, ast.With | ast.AsyncWith):
        yield from (item.context_expr for item in reversed(statement.items))
    for parent, name in source.ancestors(statement):
        if isinstance(parent, ast.With | ast.AsyncWith) and name == "body":
            yield from (item.context_expr for item in reversed(parent.items))
        if isinstance(parent, ast.FunctionDef | ast.AsyncFunctionDef) and name == "body":
            yield from reversed(parent.decorator_list)
            return
