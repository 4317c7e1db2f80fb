"""Gradients that are let go instead of being cut off and filled with zeros, where a graph still hangs on them."""

from __future__ import annotations

import ast

from gradsan.model import Diagnosis, Fix, Label
from gradsan.repair.fixes import _blocks as blocks
from gradsan.source.change import Edit, changed_lines, edited
from gradsan.source.locate import expressions_at


def suggest(diagnosis: Diagnosis) -> tuple[Fix, ...]:
    """``zero_grad(set_to_none=True)`` where the run shows that ``zero_grad(set_to_none=False)`` wrote."""
    lines: list[tuple[str, int, str]] = []
    for label in blocks.labels(diagnosis, "written"):
        lines += [line for line in _let_go(label) if line not in lines]
    return (blocks.fix("set_to_none", tuple(lines)),) if lines else ()


def _let_go(label: Label) -> tuple[tuple[str, int, str], ...]:
    for place in expressions_at(label.frame):
        call = place.node
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "zero_grad":
            given = [*call.args, *(one.value for one in call.keywords if one.arg == "set_to_none")]
            kept = [one for one in given if isinstance(one, ast.Constant) and one.value is False]
            change = edited(place.source, [Edit(place.source.span(one), "True") for one in kept], "set_to_none")
            if change is not None:
                return changed_lines(label.frame.file, change)
    return ()
