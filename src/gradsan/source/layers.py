"""Where a layer is told to work in place, and the same line without that."""

from __future__ import annotations

import ast

from gradsan.source.chains import leaf_name
from gradsan.source.change import Change, Edit, edited
from gradsan.source.tree import read_source

__all__ = ["in_place_argument", "inplace_layer_false"]

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
    source = read_source(file)
    if source is None:
        return None
    made = [
        value
        for node in ast.walk(source.module)
        if isinstance(node, ast.Call) and leaf_name(node.func) == layer
        if (value := in_place_argument(node)) is not None
    ]
    return edited(source, [Edit(source.span(made[0]), "False")], "inplace_false") if len(made) == 1 else None
