"""Whether a function reads an argument again that a call of its own has changed."""

from __future__ import annotations

import ast
import re

from gradsan.model import Frame
from gradsan.source.calls import alias_of
from gradsan.source.flow import reaching
from gradsan.source.locate import Statement, statement_at
from gradsan.source.targets import operand_expressions

__all__ = ["reads_again"]


def reads_again(name: str, call: Frame, read: Frame) -> bool:
    """Whether the operation at ``read`` reads ``name`` as it stood at ``call``, in the same function.

    False where it reads what the call has returned, as ``fc(h)`` after ``h = norm(x)`` does, or ``fc(x)`` after
    ``x = norm(x)``: whoever takes the result means the new numbers, though they lie in the same memory. Where Python
    knows no columns the source does not decide, and the answer is True.
    """
    if call.column is None or read.column is None:
        return True
    meant = {name, alias_of(call, name) or name}
    texts = operand_expressions(read)
    read_names = {*texts, *(alias_of(read, text) or text for text in texts)}
    roots = {_root(one) for one in meant for other in read_names if _is_within(one, other) or _is_within(other, one)}
    before, after = statement_at(call), statement_at(read)
    if before is None or after is None:
        return False
    return any(_keeps(root, before, after) for root in roots)


def _keeps(name: str, before: Statement, after: Statement) -> bool:
    """Whether a binding of ``name`` that reaches the one statement reaches the other, too."""
    if before.node is after.node:
        return True
    return bool(_bindings(name, before) & (_bindings(name, after) - {before.node}))


def _bindings(name: str, statement: Statement) -> set[ast.stmt | None]:
    function = statement.function
    if isinstance(function, ast.Lambda):
        return set()
    body = statement.source.module.body if function is None else function.body
    found = reaching(body, statement.node, lambda name: False).get(name, frozenset())
    return {definition.statement for definition in found} or {None}


def _is_within(inner: str, outer: str) -> bool:
    return inner == outer or inner.startswith((f"{outer}.", f"{outer}["))


def _root(name: str) -> str:
    return re.split(r"[.\[]", name, maxsplit=1)[0]
