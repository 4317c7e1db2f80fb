"""What cuts a value off its graph: operations, and modes in which no graph is recorded."""

from __future__ import annotations

import ast

from gradsan.source.chains import chain_key, dotted_path, leaf_name
from gradsan.source.tree import FunctionNode, SourceFile

__all__ = ["cut_of", "mode_around", "mode_of", "mode_of_decorators"]

_METHODS = {
    **dict.fromkeys(("detach", "detach_"), "detach"),
    **dict.fromkeys(("item", "tolist", "__float__"), "item"),
    "numpy": "numpy",
    **dict.fromkeys(("argmax", "argmin", "argsort", "nonzero", "count_nonzero", "bincount", "multinomial"), "index"),
    **dict.fromkeys(("eq", "ne", "gt", "ge", "lt", "le", "isclose", "isnan", "any", "all", "equal"), "comparison"),
    **dict.fromkeys(("long", "int", "short", "byte", "char", "bool"), "integer"),
}
_NEW_TENSOR = {"tensor", "as_tensor", "from_numpy", "asarray", "Tensor", "FloatTensor", "DoubleTensor", "LongTensor"}
_BUILTINS = {"float": "item", "int": "item", "round": "item", "bool": "item"}
_INTEGERS = frozenset({"long", "int", "int8", "int16", "int32", "int64", "short", "uint8", "bool", "LongTensor"})
_MODES = {"no_grad": "no_grad", "inference_mode": "inference_mode"}


def cut_of(source: SourceFile, node: ast.expr) -> tuple[str | None, list[ast.expr]]:
    """The kind of cut that an expression is, and what it cuts."""
    if isinstance(node, ast.Compare):
        return "comparison", [node.left, *node.comparators]
    if isinstance(node, ast.Attribute) and node.attr == "data" and chain_key(node.value) != "self":
        return "data", [node.value]
    if not isinstance(node, ast.Call):
        return None, []
    name = leaf_name(node.func) or ""
    arguments = [one for one in node.args if not isinstance(one, ast.Starred)]
    path = dotted_path(source, node.func) or ""
    if path.startswith("numpy.") and arguments:
        return "numpy", arguments
    if path.startswith("torch.") and name in _NEW_TENSOR and arguments and not isinstance(arguments[0], ast.Constant):
        return "new_tensor", arguments[:1]
    if isinstance(node.func, ast.Name) and name in _BUILTINS:
        return _BUILTINS[name], arguments
    if path.startswith("torch.") and name in _METHODS:
        return _METHODS[name], arguments[:1]
    if isinstance(node.func, ast.Attribute) and not path.startswith(("torch.", "numpy.")):
        if name in _METHODS:
            return _METHODS[name], [node.func.value]
        if name in ("to", "type") and any(leaf_name(one) in _INTEGERS for one in arguments):
            return "integer", [node.func.value]
    return None, []


def mode_around(source: SourceFile, node: ast.AST, function: FunctionNode | None) -> tuple[str, ast.AST] | None:
    """The ``with`` around ``node``, within its function, under which no graph is recorded: its kind and expression."""
    for parent, name in source.ancestors(node):
        if parent is function:
            break
        if isinstance(parent, ast.With) and name == "body":
            for item in parent.items:
                mode = mode_of(item.context_expr)
                if mode is not None:
                    return mode, item.context_expr
    return None


def mode_of_decorators(source: SourceFile, function: FunctionNode) -> tuple[str, ast.AST] | None:
    """The decorator under which no graph is recorded: its kind and expression."""
    for decorator in getattr(function, "decorator_list", ()):
        mode = mode_of(decorator)
        if mode is not None:
            return mode, decorator
    return None


def mode_of(node: ast.expr) -> str | None:
    """The mode without a graph that an expression switches on: ``no_grad`` or ``inference_mode``; else None."""
    name = leaf_name(node.func if isinstance(node, ast.Call) else node) or ""
    if name == "set_grad_enabled" and isinstance(node, ast.Call) and node.args:
        value = node.args[0]
        return "no_grad" if isinstance(value, ast.Constant) and value.value is False else None
    return _MODES.get(name)
