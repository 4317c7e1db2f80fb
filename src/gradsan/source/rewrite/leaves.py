"""Leaves made within an expression, of which only the result is kept: the result is made the leaf instead.

``nn.Parameter(torch.randn(n)) * 0.1`` is no Parameter, and nothing holds the one inside it; meant was
``nn.Parameter(torch.randn(n) * 0.1)``.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from gradsan.model import Frame
from gradsan.source.change import Change, Edit, edited, text_with, without_keyword
from gradsan.source.identifiers import leaf_name
from gradsan.source.locate import statement_at
from gradsan.source.tree import SourceFile

_SINGLE = (ast.Name, ast.Call, ast.Attribute, ast.Subscript, ast.Constant, ast.List, ast.Tuple)


def whole_as_leaf(frame: Frame) -> Change | None:
    """The statement at ``frame`` with the whole of the value that it binds as the leaf, instead of a part of it.

    ``w = torch.randn(3, requires_grad=True) / 2`` becomes ``w = (torch.randn(3) / 2).requires_grad_()``. None where the
    value has no such part, or several, or is one itself.
    """
    statement = statement_at(frame)
    if statement is None or not isinstance(statement.node, (ast.Assign, ast.AnnAssign)):
        return None
    source, value = statement.source, statement.node.value
    parts = [] if value is None else list(_leaves_in(value))
    if value is None or len(parts) != 1 or parts[0] is value:
        return None
    edit = _as_data(source, parts[0])
    if edit is None:
        return None
    data = text_with(source, source.span(value), [edit])
    whole = source.span(value)
    if leaf_name(parts[0].func) == "Parameter":
        return edited(source, [Edit(whole, f"{ast.unparse(parts[0].func)}({data})")], "leaf_of_whole")
    data = data if isinstance(value, _SINGLE) else f"({data})"
    return edited(source, [Edit(whole, f"{data}.requires_grad_()")], "leaf_of_whole")


def _leaves_in(value: ast.expr) -> Iterator[ast.Call]:
    """The calls within an expression that make a leaf: a Parameter, or a tensor that is told to require a gradient."""
    for node in ast.walk(value):
        if isinstance(node, (ast.Lambda, ast.ListComp, ast.GeneratorExp, ast.DictComp, ast.SetComp)):
            return
        if isinstance(node, ast.Call) and (leaf_name(node.func) in ("Parameter", "requires_grad_") or _requires(node)):
            yield node


def _requires(call: ast.Call) -> bool:
    given = next((one.value for one in call.keywords if one.arg == "requires_grad"), None)
    return isinstance(given, ast.Constant) and given.value is True


def _as_data(source: SourceFile, made: ast.Call) -> Edit | None:
    """The edit that puts the values of a leaf in its place."""
    if leaf_name(made.func) == "requires_grad_":
        given = made.func.value if isinstance(made.func, ast.Attribute) and not made.args else None
    elif leaf_name(made.func) in ("Parameter", "Variable"):
        given = made.args[0] if len(made.args) == 1 else None
    else:
        return without_keyword(source, made, "requires_grad")
    if given is None or (made.keywords and not _requires(made)):
        return None
    text = text_with(source, source.span(given), [])
    return Edit(source.span(made), text if isinstance(given, _SINGLE) else f"({text})")
