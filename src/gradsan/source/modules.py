"""Which module a call such as ``self.act(x)`` reaches, as far as the same file tells."""

from __future__ import annotations

import ast

from gradsan.source.chains import chain_key, constant_key, leaf_name
from gradsan.source.names import bindings_of
from gradsan.source.tree import SourceFile

__all__ = ["constructors", "is_elementwise_module"]

_ELEMENTWISE = frozenset(
    {
        "AlphaDropout",
        "CELU",
        "Dropout",
        "Dropout1d",
        "Dropout2d",
        "Dropout3d",
        "ELU",
        "FeatureAlphaDropout",
        "Hardsigmoid",
        "Hardswish",
        "Hardtanh",
        "LeakyReLU",
        "Mish",
        "RReLU",
        "ReLU",
        "ReLU6",
        "SELU",
        "SiLU",
        "Threshold",
    }
)
_CONTAINERS = frozenset({"Sequential", "ModuleList"})
_TELLING_NAMES = ("act", "relu", "elu", "silu", "swish", "mish", "drop", "nonlin", "non_lin", "tanh", "sigmoid")
_MAX_DEPTH = 4


def is_elementwise_module(source: SourceFile, callee: ast.expr) -> bool:
    """Whether ``callee`` is a module of one activation or dropout, so that it writes to what it is given.

    Decided by what the file assigns to that name; only where it assigns nothing, by the name itself.
    """
    values = constructors(source, callee)
    calls = [value for value in values if isinstance(value, ast.Call)]
    if calls:
        return all(leaf_name(call.func) in _ELEMENTWISE for call in calls)
    name = (leaf_name(callee) or "").lower()
    return any(part in name for part in _TELLING_NAMES)


def constructors(source: SourceFile, callee: ast.expr, depth: int = 0) -> list[ast.expr]:
    """What the file assigns to ``callee``: ``self.act`` in its class, a name anywhere; all branches of a choice.

    Follows an index or a ``for`` into a list, ``nn.Sequential`` or ``nn.ModuleList`` written out in the file.
    """
    if depth > _MAX_DEPTH:
        return []
    if isinstance(callee, ast.Subscript):
        index = constant_key(callee.slice)
        elements = _elements(source, callee.value, depth)
        if isinstance(index, int) and -len(elements) <= index < len(elements):
            return _branches(elements[index])
        return [branch for element in elements for branch in _branches(element)]
    key = chain_key(callee)
    if key is None:
        return []
    within = source.owner_class(callee) if key.startswith("self.") else None
    found: list[ast.expr] = []
    for node in ast.walk(within or source.module):
        if isinstance(node, ast.Assign | ast.AnnAssign):
            values = [one.value for one in bindings_of(node) if one.name == key and one.value is not None]
            found.extend(branch for value in values for branch in _branches(value))
        elif isinstance(node, ast.For | ast.AsyncFor | ast.comprehension) and chain_key(node.target) == key:
            found.extend(branch for item in _elements(source, node.iter, depth) for branch in _branches(item))
    return found


def _elements(source: SourceFile, container: ast.expr, depth: int) -> list[ast.expr]:
    values = [container] if isinstance(container, ast.List | ast.Tuple) else constructors(source, container, depth + 1)
    found: list[ast.expr] = []
    for value in values:
        if isinstance(value, ast.List | ast.Tuple):
            found.extend(value.elts)
        elif isinstance(value, ast.Call) and leaf_name(value.func) in _CONTAINERS:
            for argument in value.args:
                found.extend(argument.elts if isinstance(argument, ast.List | ast.Tuple) else [argument])
    return found


def _branches(value: ast.expr) -> list[ast.expr]:
    if isinstance(value, ast.IfExp):
        return [*_branches(value.body), *_branches(value.orelse)]
    if isinstance(value, ast.BoolOp):
        return [branch for operand in value.values for branch in _branches(operand)]
    return [value]
