"""Functions of the file that do something for their one caller."""

from __future__ import annotations

import ast
from dataclasses import replace

from gradsan.model import Frame
from gradsan.source.flow.scopes import arguments_of
from gradsan.source.identifiers import bindings_of, chain_key, leaf_name, local_nodes
from gradsan.source.tree import SourceFile, read_source


def set_by_call(frame: Frame, path: str) -> Frame | None:
    """The statement ``begin(net)`` that sets ``net.head``, in the file of ``frame``: ``def begin(m): m.head = …``.

    None where no function does, or several, or the file calls it at several places or reads its result.
    """
    source = read_source(frame.file)
    functions = [one for one in ([] if source is None else source.nodes) if isinstance(one, ast.FunctionDef)]
    places = [(one, at) for one in functions if source and (at := _only_call(source, one)) is not None]
    found = [at for one, at in places if path in _set_for(one, at)]
    if source is None or len(found) != 1:
        return None
    span, caller = source.span(found[0]), source.function(found[0])
    place = replace(frame, line=span.line, column=span.column, end_line=span.end_line, end_column=span.end_column)
    return replace(place, function=getattr(caller, "name", "<module>"))


def _only_call(source: SourceFile, function: ast.FunctionDef) -> ast.Expr | None:
    calls = [one for one in source.nodes if isinstance(one, ast.Call) and leaf_name(one.func) == function.name]
    at = source.statement(calls[0]) if len(calls) == 1 else None
    is_alone = isinstance(at, ast.Expr) and at.value is calls[0] and isinstance(calls[0].func, ast.Name)
    return at if isinstance(at, ast.Expr) and is_alone else None


def _set_for(function: ast.FunctionDef, at: ast.Expr) -> set[str]:
    """The attributes of arguments that the function sets, as its caller calls them."""
    passed = (
        {name: chain_key(value) for name, value in arguments_of(function, at.value)}
        if isinstance(at.value, ast.Call)
        else {}
    )
    bound = [one.name for node in local_nodes(function) if isinstance(node, ast.stmt) for one in bindings_of(node)]
    parts = [(passed.get(root), rest) for root, dot, rest in (one.partition(".") for one in bound) if dot]
    return {f"{owner}.{rest}" for owner, rest in parts if owner is not None}
