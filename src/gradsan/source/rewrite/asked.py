"""What ``autograd.grad`` is asked for: its outputs, reduced to one number; and gradients assigned in their tensor's shape."""

from __future__ import annotations

import ast

from gradsan.model import Frame
from gradsan.source.change import Change, Edit, edited
from gradsan.source.identifiers import leaf_name
from gradsan.source.locate import expressions_at, statement_at
from gradsan.source.tree import SourceFile

_TAKES_METHOD = (ast.Name, ast.Attribute, ast.Subscript, ast.Call)


def differentiated(frame: Frame) -> str | None:
    """``u`` of the one call ``autograd.grad(u, x)`` at ``frame``; None for several outputs, and where there is no call."""
    found = _outputs(frame)
    return None if found is None else found[0].text(found[1])


def sum_differentiated(frame: Frame) -> Change | None:
    """``autograd.grad(u.sum(), x)`` for ``autograd.grad(u, x)``."""
    found = _outputs(frame)
    return None if found is None else edited(found[0], _called(*found, ".sum()"), "sum_differentiated")


def _outputs(frame: Frame) -> tuple[SourceFile, ast.expr] | None:
    calls = [
        (place.source, place.node)
        for place in expressions_at(frame)
        if isinstance(place.node, ast.Call) and leaf_name(place.node.func) == "grad"
    ]
    if len(calls) != 1:
        return None
    source, call = calls[0]
    named = [one.value for one in call.keywords if one.arg == "outputs"]
    value = next(iter([*call.args[:1], *named]), None)
    return None if value is None or isinstance(value, ast.List | ast.Tuple | ast.Starred) else (source, value)


def _called(source: SourceFile, value: ast.expr, method: str) -> list[Edit]:
    span = source.span(value)
    if isinstance(value, _TAKES_METHOD):
        return [Edit.after(span, method)]
    return [Edit.before(span, "("), Edit.after(span, f"){method}")]


def gradient_in_shape(frame: Frame) -> Change | None:
    """``p.grad = flat[i:j].view_as(p)`` for ``p.grad = flat[i:j]``."""
    statement = statement_at(frame)
    node = None if statement is None else statement.node
    if statement is None or not isinstance(node, ast.Assign) or len(node.targets) != 1:
        return None
    target, source = node.targets[0], statement.source
    if not isinstance(target, ast.Attribute) or target.attr != "grad":
        return None
    return edited(source, _called(source, node.value, f".view_as({source.text(target.value)})"), "gradient_in_shape")
