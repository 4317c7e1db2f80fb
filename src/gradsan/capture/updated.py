"""State that a function only updates: call counters, running statistics of its own, a log of what it saw.

Its values have no part in what the function computes, as far as its source tells: each statement that has the name
changes the very thing, and does nothing else with it.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType


def is_only_updated(name: str, functions: Iterable[FunctionType]) -> bool:
    """Whether some of ``functions`` update the variable or attribute ``name``, and none reads it otherwise."""
    codes = [one.__code__ for one in functions]
    verdicts = [verdict for one in codes if (verdict := _verdict(one, one.co_filename, name)) is not None]
    return bool(verdicts) and all(verdicts)


# Kept by code, not by function: a function keeps what it has closed over. Code of the same text is equal in all files.
@functools.lru_cache(maxsize=4096)
def _verdict(code: CodeType, file: str, name: str) -> bool | None:
    """Whether every statement with ``name`` is an update of it; None where there is none, False without source."""
    if name not in (*code.co_names, *code.co_freevars, *code.co_varnames, *code.co_cellvars):
        return None
    tree = _tree(code, file)
    if tree is None:
        return False
    found = [one for statement in _simple(tree) if (one := _updates(statement, name)) is not None]
    return all(found) if found else None


@functools.lru_cache(maxsize=1024)
def _tree(code: CodeType, _: str) -> ast.AST | None:
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(code)))
    except (OSError, TypeError, SyntaxError):
        return None


def _simple(tree: ast.AST) -> Iterator[ast.AST]:
    """Statements without a body, and the expressions that stand at the head of the others."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.stmt) and hasattr(node, "body"):
            yield from _simple(node)
        elif isinstance(node, (ast.stmt, ast.expr, ast.withitem)):
            yield node
        else:
            yield from _simple(node)


def _updates(statement: ast.AST, name: str) -> bool | None:
    """Whether a statement changes ``name`` and nothing else; None where it does not have the name."""
    if isinstance(statement, (ast.Global, ast.Nonlocal)) or not any(
        _is_named(node, name) for node in ast.walk(statement)
    ):
        return None
    if isinstance(statement, (ast.AugAssign, ast.AnnAssign)):
        return _is_rooted(statement.target, name)
    if isinstance(statement, ast.Assign):
        return len(statement.targets) == 1 and _is_rooted(statement.targets[0], name)
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        called = statement.value.func
        # Whatever a method that stands alone is called, it is there for what it changes.
        while isinstance(called, ast.Attribute) and isinstance(called.value, ast.Call):
            called = called.value.func
        return isinstance(called, ast.Attribute) and _is_rooted(called.value, name)
    return False


def _is_named(node: ast.AST, name: str) -> bool:
    return (isinstance(node, ast.Name) and node.id == name) or (isinstance(node, ast.Attribute) and node.attr == name)


def _is_rooted(node: ast.AST, name: str) -> bool:
    """Whether ``node`` is ``name`` or ``self.name``, or an element of it."""
    while isinstance(node, ast.Subscript):
        node = node.value
    return _is_named(node, name)
