"""Variables that share memory with what an expression returns: views, pieces, and results of functions of the file."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator

from gradsan.source.flow.reaching import Definition, reaching
from gradsan.source.flow.scopes import arguments_of
from gradsan.source.flow.targets import aliased_expression
from gradsan.source.identifiers import chain_key, leaf_name, local_nodes, parameters
from gradsan.source.methods import PIECES
from gradsan.source.tree import FunctionNode, SourceFile

_DEPTH = 3


def shared_names(source: SourceFile, value: ast.expr, depth: int = _DEPTH) -> frozenset[str]:
    """The variables whose memory ``value``, or a part of a tuple, may be: ``x`` of ``x.chunk(2)`` and ``halves(x)``.

    A function counts where the file has one of that name: what it returns is followed through its assignments.
    """
    if isinstance(value, ast.Tuple | ast.List):
        return frozenset().union(*(shared_names(source, one, depth) for one in value.elts))
    if isinstance(value, ast.IfExp):
        return shared_names(source, value.body, depth) | shared_names(source, value.orelse, depth)
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr in PIECES:
        return shared_names(source, value.func.value, depth)
    if isinstance(value, ast.Call) and depth:
        called = _function_of_file(source, leaf_name(value.func) or "")
        if called is not None:
            given = dict(arguments_of(called, value))
            passed = (given[name] for name in _returned(source, called, depth - 1) if name in given)
            return frozenset().union(*(shared_names(source, one, depth - 1) for one in passed))
    root = aliased_expression(source, value)
    key = None if root is None else chain_key(root)
    return frozenset() if key is None else frozenset({key})


@functools.lru_cache(maxsize=64)
def _returned(source: SourceFile, function: FunctionNode, depth: int) -> frozenset[str]:
    """The parameters of which a function returns views, or that it returns themselves."""
    nodes = local_nodes(function)
    found = frozenset[str]().union(
        *(shared_names(source, one.value, depth) for one in nodes if isinstance(one, ast.Return) and one.value)
    )
    bound = [(name, value) for node in nodes for name, value in _bindings(node)]
    for _ in range(len(bound)):
        more = frozenset[str]().union(*(shared_names(source, value, depth) for name, value in bound if name in found))
        if more <= found:
            break
        found |= more
    return found & frozenset(parameters(function))


def _bindings(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    for target in node.targets if isinstance(node, ast.Assign) else ():
        names = target.elts if isinstance(target, ast.Tuple | ast.List) else [target]
        values = node.value.elts if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple) else []
        for at, name in enumerate(names):
            if isinstance(name, ast.Name) and isinstance(node, ast.Assign):
                yield name.id, values[at] if len(values) == len(names) else node.value


def _function_of_file(source: SourceFile, name: str) -> FunctionNode | None:
    found = [one for one in source.nodes if isinstance(one, ast.FunctionDef) and one.name == name]
    return found[0] if len(found) == 1 else None


def is_read_as_whole(source: SourceFile, binding: ast.Assign, written: ast.Name) -> bool:
    """Whether the variable of which ``binding`` took a part as ``written`` is read after the write, as it was then.

    An attribute may be read anywhere.
    """
    statement, scope = source.statement(written), source.function(written) or source.module
    if statement is None or isinstance(scope, ast.Lambda):
        return False
    later = [
        node
        for node in local_nodes(scope)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and source.span(node) > source.span(statement)
    ]
    for name in shared_names(source, binding.value) - {written.id}:
        if "." in name:
            return True
        held = _definitions(scope, binding, name)
        at = (source.statement(node) for node in later if node.id == name)
        if any(one is not None and not held.isdisjoint(_definitions(scope, one, name)) for one in at):
            return True
    return False


def _definitions(scope: FunctionNode | ast.Module, at: ast.stmt, name: str) -> frozenset[ast.stmt | None]:
    """The statements that may have bound a name; None for what was there before the function's body."""
    found: frozenset[Definition] = (
        reaching(scope.body, at).get(name, frozenset()) if isinstance(scope.body, list) else frozenset()
    )
    return frozenset(one.statement for one in found) or frozenset({None})
