"""Operations that cut a value off its graph, undone: the line without them, or with a form that keeps the graph."""

from __future__ import annotations

import ast

from gradsan.model import Frame
from gradsan.source.change import Change, Edit, edited, with_keyword
from gradsan.source.flow import reaching
from gradsan.source.identifiers import bindings_of, chain_key
from gradsan.source.locate import Expression, expression_at
from gradsan.source.tree import SourceFile

__all__ = ["undone"]

_LISTS = (ast.List, ast.ListComp, ast.Tuple)
_IS_OPERAND = (ast.Name, ast.Attribute, ast.Subscript, ast.Call)


def undone(frame: Frame, kind: str) -> Change | None:
    """The line of ``frame``, the place of a cut of this kind, with a graph; None where it does not tell how.

    ``x.item()`` and ``float(x)`` become ``x``, ``torch.tensor(losses)`` of a list becomes ``torch.stack(losses)``, and
    ``autograd.grad`` is asked for a graph. Nobody writes ``detach()`` or ``.data`` by chance: these stay.
    """
    place = expression_at(frame)
    edit = None if place is None else _edit(place, kind)
    return None if place is None or edit is None else edited(place.source, [edit], "undone")


def _edit(place: Expression, kind: str) -> Edit | None:
    source, node = place.source, place.node
    if not isinstance(node, ast.Call):
        return None
    if kind == "gradient":
        return with_keyword(source, node, "create_graph", "True")
    if kind == "new_tensor":
        return _stacked(place, node)
    if kind != "item" or node.keywords:
        return None
    is_method = isinstance(node.func, ast.Attribute) and not node.args
    value = node.func.value if isinstance(node.func, ast.Attribute) and is_method else next(iter(node.args), None)
    if value is None or len(node.args) > 1 or not isinstance(value, _IS_OPERAND):
        return None
    return Edit(source.span(node), source.text(value))


def _stacked(place: Expression, call: ast.Call) -> Edit | None:
    """``torch.stack(xs)`` for ``torch.tensor(xs)`` of a list of tensors; nothing but the list may decide the result."""
    source, value = place.source, call.args[0] if len(call.args) == 1 else None
    kept = [one for one in call.keywords if one.arg != "requires_grad"]
    if (
        value is None
        or kept
        or not isinstance(call.func, ast.Attribute)
        or not _is_list(source, place.statement, value)
    ):
        return None
    return Edit(source.span(call), f"{source.text(call.func.value)}.stack({source.text(value)})")


def _is_list(source: SourceFile, at: ast.stmt, value: ast.expr) -> bool:
    key = chain_key(value)
    if key is None:
        return isinstance(value, _LISTS)
    function = source.function(at)
    body = source.module.body if function is None else function.body
    state = reaching(body, at, lambda _: function is None) if isinstance(body, list) else {}
    bound = [
        binding.value
        for one in state.get(key, ())
        for binding in (bindings_of(one.statement) if one.statement is not None else ())
        if binding.name == key and binding.method is None
    ]
    return bool(bound) and all(isinstance(one, _LISTS) for one in bound)
