"""Where a layer is told to work in place, and the same line without that."""

from __future__ import annotations

import ast

from gradsan.source.chains import leaf_name
from gradsan.source.change import Change, Edit, edited
from gradsan.source.tree import read_source

__all__ = ["in_place_argument", "inplace_attribute_false", "inplace_layer_false", "inplace_layers_false"]

# The position of ``inplace`` among the arguments of the layers of torch.nn (2.6 to 2.13).
_POSITIONS = {
    "AlphaDropout": 1,
    "CELU": 1,
    "Dropout": 1,
    "Dropout1d": 1,
    "Dropout2d": 1,
    "Dropout3d": 1,
    "ELU": 1,
    "FeatureAlphaDropout": 1,
    "Hardsigmoid": 0,
    "Hardswish": 0,
    "Hardtanh": 2,
    "LeakyReLU": 1,
    "Mish": 0,
    "RReLU": 2,
    "ReLU": 0,
    "ReLU6": 0,
    "SELU": 0,
    "SiLU": 0,
    "Threshold": 2,
}


def in_place_argument(call: ast.Call) -> ast.expr | None:
    """The ``True`` with which ``call`` makes a layer that works in place, by keyword or by position."""
    position = _POSITIONS.get(leaf_name(call.func) or "")
    values = [keyword.value for keyword in call.keywords if keyword.arg == "inplace"]
    if position is not None and len(call.args) > position:
        before = call.args[: position + 1]
        values += [] if any(isinstance(argument, ast.Starred) for argument in before) else [call.args[position]]
    return next((value for value in values if isinstance(value, ast.Constant) and value.value is True), None)


def inplace_layer_false(file: str, layer: str) -> Change | None:
    """``False`` where ``file`` makes a ``layer`` (``LeakyReLU``) that works in place; None unless it is one place."""
    found = inplace_layers_false(file, layer)
    return found[0] if len(found) == 1 else None


def inplace_layers_false(file: str, layer: str) -> tuple[Change, ...]:
    """``False`` at each place where ``file`` makes a ``layer`` that works in place; last, if there are several, at all.

    A ``functools.partial`` of the layer makes it, too. Empty where there is no such place.
    """
    source = read_source(file)
    if source is None:
        return ()
    calls = [node for node in ast.walk(source.module) if isinstance(node, ast.Call) and _makes(node, layer)]
    values = sorted({value for call in calls if (value := in_place_argument(call)) is not None}, key=source.span)
    edits = [Edit(source.span(value), "False") for value in values]
    choices = [[edit] for edit in edits] + ([edits] if len(edits) > 1 else [])
    return tuple(change for choice in choices if (change := edited(source, choice, "inplace_false")) is not None)


def inplace_attribute_false(file: str) -> Change | None:
    """``False`` wherever ``file`` sets the attribute ``inplace`` of something to ``True``; None where it does not."""
    source = read_source(file)
    if source is None:
        return None
    values: list[ast.expr] = []
    for node in ast.walk(source.module):
        if isinstance(node, ast.Assign) and any(_is_flag(target) for target in node.targets):
            values.append(node.value)
        elif isinstance(node, ast.Call) and leaf_name(node.func) == "setattr" and len(node.args) == 3:
            named = node.args[1]
            values += [node.args[2]] if isinstance(named, ast.Constant) and named.value == "inplace" else []
    edits = [Edit(source.span(value), "False") for value in values if _is_true(value)]
    return edited(source, edits, "inplace_false")


def _makes(call: ast.Call, layer: str) -> bool:
    name = leaf_name(call.func)
    return name == layer or (name == "partial" and bool(call.args) and leaf_name(call.args[0]) == layer)


def _is_flag(target: ast.expr) -> bool:
    return isinstance(target, ast.Attribute) and target.attr == "inplace"


def _is_true(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value is True
