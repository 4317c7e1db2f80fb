"""Names of a value that is changed in place: read again afterwards, or taken for the function's own."""

from __future__ import annotations

import ast
from typing import Literal

from gradsan.model import Frame
from gradsan.source.identifiers import (
    Binding,
    assigned_names,
    bindings_of,
    chain_key,
    consumed_names,
    leaf_name,
    local_nodes,
)
from gradsan.source.locate import Statement, expression_at, statement_at

__all__ = ["first_argument", "is_of_itself", "read_as_before", "taken_for_own"]

_CONVERSIONS = frozenset(
    {
        "float",
        "double",
        "half",
        "bfloat16",
        "to",
        "type",
        "as_tensor",
        "asarray",
        "contiguous",
        "cpu",
        "cuda",
        "type_as",
    }
)
"""What gives a copy, or the very tensor where there is nothing to convert."""


def first_argument(frame: Frame) -> str | None:
    """``x`` of ``self.relu(x)`` at ``frame``; None where it has no name."""
    found = expression_at(frame)
    call = found.node if found is not None else None
    return chain_key(call.args[0]) if isinstance(call, ast.Call) and call.args else None


def read_as_before(name: str, call: Frame, read: Frame) -> str | None:
    """The name by which ``read`` reads what the call at ``call`` was given as ``name`` and has changed.

    That is ``name``, or one that was bound to it before (``identity = x``). None where the two are not in one function,
    where the call's result is dropped (it is there for what it writes), and for a name that is bound anew in between.
    """
    here, there = statement_at(call), statement_at(read)
    if here is None or there is None or here.function is not there.function or isinstance(here.node, ast.Expr):
        return None
    if here.function is None or isinstance(here.function, ast.Lambda) or not here.node.lineno < there.node.lineno:
        return None
    names = {name, *_bound_to(name, here)} - set(assigned_names(here))
    read_here = [*consumed_names(there)]
    if isinstance(there.node, ast.AugAssign):
        read_here.append(chain_key(there.node.target) or "")
    last = here.node.end_lineno or here.node.lineno
    anew = {
        bound
        for node in local_nodes(here.function)
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.For) and last < node.lineno < there.node.lineno
        for bound in assigned_names(node)
    }
    return next((one for one in read_here if one in names - anew), None)


def _bound_to(name: str, before: Statement) -> set[str]:
    """The names bound to just ``name`` before a statement, as long as neither is bound anew."""
    found: set[str] = set()
    assert before.function is not None
    bindings = [node for node in local_nodes(before.function) if isinstance(node, ast.Assign | ast.AugAssign)]
    for node in sorted(bindings, key=lambda one: one.lineno):
        if node.lineno >= before.node.lineno:
            break
        bound = set(assigned_names(node))
        if name in bound:
            found.clear()
        found -= bound
        if isinstance(node, ast.Assign) and chain_key(node.value) == name:
            found |= bound
    return found


def taken_for_own(frame: Frame, name: str) -> Literal["conversion", "element"] | None:
    """How the function at ``frame`` came by what it calls ``name``: by a conversion, or as a part of something larger.

    None where it came by it otherwise, or several ways.
    """
    binding = _last_binding(frame, name)
    if binding is None:
        return None
    value, statement = binding.value, binding.statement
    if isinstance(statement, ast.For | ast.AsyncFor):
        return "element"
    if isinstance(value, ast.Call):
        return "conversion" if leaf_name(value.func) in _CONVERSIONS else None
    return "element" if isinstance(value, ast.Subscript) else None


def is_of_itself(frame: Frame, name: str) -> bool:
    """Whether the statement at ``frame`` computes with statistics of ``name`` itself: ``x -= x.mean()``."""
    statement = statement_at(frame)
    if statement is None:
        return True
    node = statement.node
    inside: list[ast.expr] = []
    if isinstance(node, ast.AugAssign):
        inside = [node.value]
    else:
        inside = [one for call in ast.walk(node) if isinstance(call, ast.Call) for one in call.args]
    read = {one for expression in inside for one in consumed_names(expression)}
    if name in read:
        return True
    for one in read:
        binding = _last_binding(frame, one)
        if binding is not None and binding.value is not None and name in consumed_names(binding.value):
            return True
    return False


def _last_binding(frame: Frame, name: str) -> Binding | None:
    statement = statement_at(frame)
    if statement is None or isinstance(statement.function, ast.Lambda):
        return None
    scope = statement.source.module if statement.function is None else statement.function
    found: Binding | None = None
    nodes = [node for node in local_nodes(scope) if isinstance(node, ast.Assign | ast.AnnAssign | ast.For)]
    for node in sorted(nodes, key=lambda one: one.lineno):
        if node.lineno < statement.node.lineno:
            found = next((one for one in bindings_of(node) if one.name == name), found)
    return found
