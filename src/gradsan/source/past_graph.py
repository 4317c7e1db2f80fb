"""Expressions that read a tensor past its graph (``x.data``, ``x.detach()``), with the tensor itself in their place."""

from __future__ import annotations

import ast

from gradsan.model import Frame
from gradsan.source.change import Change, Edit, edited
from gradsan.source.locate import expression_at
from gradsan.source.tree import header_nodes

__all__ = ["read_with_graph"]


def read_with_graph(frame: Frame) -> Change | None:
    """The line of ``frame`` without the ``.data`` or ``.detach()`` that it stood at; None where it stood at neither."""
    place = expression_at(frame)
    if place is None or not isinstance(place.node, ast.Attribute):
        return None
    read: ast.expr = place.node
    if place.node.attr == "detach":
        calls = [one for one in header_nodes(place.statement) if isinstance(one, ast.Call) and one.func is place.node]
        if len(calls) != 1 or calls[0].args or calls[0].keywords:
            return None
        read = calls[0]
    elif place.node.attr != "data":
        return None
    source = place.source
    return edited(source, [Edit(source.span(read), source.text(place.node.value))], "read_with_graph")
