"""Variables whose values nothing reads once a round is over."""

from __future__ import annotations

import ast
from collections.abc import Iterable

from gradsan.source.flow.rounds import bound_each_round
from gradsan.source.identifiers import binds, leaf_name
from gradsan.source.methods import ADDING
from gradsan.source.tree import FunctionNode, SourceFile, read_source

_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_PRINTING = frozenset({"print"})


def of_one_round(file: str, line: int) -> frozenset[str]:
    """The variables that every round at ``line`` binds before it reads them, and that it alone reads, in every round.

    Others are read after the loop, by a function defined here, under a condition, by the caller, or by what a statement
    hands them to, which may do so in some rounds only: ``report(step, out)``.
    """
    source, bound = read_source(file), bound_each_round(file, line)
    if source is None or not bound:
        return bound
    statements = [one for one in source.nodes if isinstance(one, ast.stmt)]
    around = [one for one in statements if one.lineno <= line <= (one.end_lineno or 0)]
    at = max(around, key=lambda one: one.lineno)
    function = source.function(at)
    scope = list(source.nodes if function is None else ast.walk(function))
    loops = [one for one in around if isinstance(one, _LOOPS) and source.function(one) is function]
    end = max((one.end_lineno or 0 for one in loops), default=None)
    own = [one for one in scope if source.function(one) is function and end is not None]
    later = {name for one in own if isinstance(one, ast.expr) and one.lineno > (end or 0) for name in _names(one)}
    return bound - later - _read_at_times(source, function, scope)


def _read_at_times(source: SourceFile, function: FunctionNode | None, scope: Iterable[ast.AST]) -> set[str]:
    found = set[str]()
    for node in scope:
        if isinstance(node, _FUNCTIONS) and node is not function:
            inner = [one for one in ast.walk(node) if isinstance(one, _FUNCTIONS)]
            found |= {name for name in _names(node) if not any(binds(one, name) for one in inner)}
        if source.function(node) is not function:
            continue
        if isinstance(node, ast.If | ast.ExceptHandler):
            for block in (node.body, getattr(node, "orelse", [])):
                inside = [one for statement in block for one in ast.walk(statement)]
                bound = {one.id for one in inside if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)}
                found |= set().union(*map(_names, block)) - bound
        elif isinstance(node, ast.Return | ast.Yield):
            found |= _names(node)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            given = [*node.value.args, *(one.value for one in node.value.keywords)]
            if leaf_name(node.value.func) not in ADDING | _PRINTING:
                found |= set().union(*map(_names, given))
    return found


def _names(node: ast.AST) -> set[str]:
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Load)}
