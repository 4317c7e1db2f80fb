"""What a statement takes that another statement has made, and the line that takes it detached."""

from __future__ import annotations

import ast

from gradsan.model import Frame
from gradsan.source.chains import chain_key
from gradsan.source.change import Change, Edit, edited
from gradsan.source.flow import reaching
from gradsan.source.locate import Statement, statement_at
from gradsan.source.names import assigned_names, bindings_of, consumed_names
from gradsan.source.tree import header_nodes

__all__ = ["bound_names", "detach_reads", "taken_from"]

_DEEPEST = 6
_NOT_VALUES = frozenset({"backward", "device", "dtype", "grad", "is_cuda", "ndim", "requires_grad", "shape", "size"})


def taken_from(taken: Frame, made: Frame) -> list[str]:
    """The names read at ``taken`` whose value the statement at ``made``, of the same function, has computed.

    Directly, or through statements between the two. Empty where the source does not tell.
    """
    reader, maker = statement_at(taken), statement_at(made)
    if reader is None or maker is None or reader.node is maker.node or reader.function is not maker.function:
        return []
    return [name for name in consumed_names(reader) if _comes_from(name, reader, reader.node, maker.node, _DEEPEST)]


def bound_names(frame: Frame) -> list[str]:
    """The names that the statement at ``frame`` binds."""
    statement = statement_at(frame)
    return [] if statement is None else assigned_names(statement)


def detach_reads(frame: Frame, name: str) -> Change | None:
    """The statement at ``frame`` with every read of ``name`` detached: ``D(fake)`` becomes ``D(fake.detach())``.

    None where it reads none, or binds ``name`` itself in place.
    """
    statement = statement_at(frame)
    if statement is None or isinstance(statement.node, ast.AugAssign):
        return None
    source = statement.source
    edits: list[Edit] = []
    for node in header_nodes(statement.node):
        if not isinstance(node, ast.Name | ast.Attribute | ast.Subscript) or not isinstance(node.ctx, ast.Load):
            continue
        if chain_key(node) != name:
            continue
        parent, field = source.parents[node]
        if isinstance(parent, ast.Call) and field == "func":
            return None
        if isinstance(parent, ast.Attribute) and parent.attr in _NOT_VALUES:
            continue
        span = source.span(node)
        edits.append(Edit.insert(span.end_line, span.end_column, ".detach()"))
    return edited(source, edits, "detach")


def _comes_from(name: str, reader: Statement, at: ast.stmt, maker: ast.stmt, depth: int) -> bool:
    function = reader.function
    if isinstance(function, ast.Lambda) or depth == 0:
        return False
    body = reader.source.module.body if function is None else function.body
    found = reaching(body, at, lambda _: False)
    for key in (name, name.replace("[", ".").split(".")[0]):
        for definition in found.get(key, frozenset()):
            node = definition.statement
            if node is maker:
                return True
            if node is None or node is at or not any(one.name == key and one.computed for one in bindings_of(node)):
                continue
            if any(_comes_from(one, reader, node, maker, depth - 1) for one in consumed_names(node)):
                return True
    return False
