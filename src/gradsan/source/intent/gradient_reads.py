"""Whether a file reads gradients, only measures them, or sets any."""

from __future__ import annotations

import ast
import functools

from gradsan.source.identifiers import leaf_name
from gradsan.source.tree import SourceFile, read_source

_CLEARS = frozenset({"zero_", "fill_", "detach_", "requires_grad_"})
_MEASURES = frozenset({"amax", "amin", "max", "mean", "median", "min", "norm", "std", "sum", "var", "vector_norm"})
_STEPS_ON = frozenset({"abs", "cpu", "data", "detach", "double", "flatten", "float", "pow", "square", "view"})
"""Methods whose result stands for the gradient on the way to a measure."""


@functools.lru_cache(maxsize=256)
def reads_gradients(file: str) -> bool:
    """Whether code in ``file`` reads some ``.grad`` other than to clear it or to compare it with None.

    True where the source is not available.
    """
    source = read_source(file)
    return source is None or any(is_gradient_read(source, node) for node in source.nodes)


@functools.lru_cache(maxsize=256)
def sets_gradients(file: str) -> bool:
    """Whether code in ``file`` assigns some ``.grad`` other than None; True where the source is not available."""
    source = read_source(file)
    for node in () if source is None else source.nodes:
        if isinstance(node, ast.Attribute) and node.attr == "grad" and isinstance(node.ctx, ast.Store):
            value = getattr(source.statement(node), "value", None) if source is not None else None
            if not (isinstance(value, ast.Constant) and value.value is None):
                return True
    return source is None


@functools.lru_cache(maxsize=256)
def measures_gradients(file: str) -> bool:
    """Whether each read of some ``.grad`` in ``file`` is the start of a norm, a largest element or the like."""
    source = read_source(file)
    if source is None:
        return False
    return all(_is_measured(source, node) for node in source.nodes if is_gradient_read(source, node))


def _is_measured(source: SourceFile, node: ast.AST) -> bool:
    parent, _ = source.parents[node]
    while isinstance(parent, ast.Attribute | ast.Call):
        name = parent.attr if isinstance(parent, ast.Attribute) else leaf_name(parent.func)
        if name in _MEASURES:
            return True
        if name not in _STEPS_ON:
            return False
        parent, _ = source.parents[parent]
    return False


def is_gradient_read(source: SourceFile, node: ast.AST) -> bool:
    """Whether a node reads some ``.grad`` other than to clear it or to compare it with None."""
    if isinstance(node, ast.Call):
        names = [one.value for one in node.args[1:2] if isinstance(one, ast.Constant)]
        return leaf_name(node.func) == "getattr" and names == ["grad"]
    if not isinstance(node, ast.Attribute) or node.attr not in ("grad", "_grad"):
        return False
    at, (parent, field) = node, source.parents[node]
    if isinstance(node.ctx, ast.Store | ast.Del):
        return isinstance(parent, ast.AugAssign)
    while isinstance(parent, ast.Attribute) and parent.attr in ("data", *_CLEARS):
        at, (parent, field) = parent, source.parents[parent]
    if isinstance(parent, ast.Call) and field == "func":
        # A function of that name, such as ``autograd.grad``; or one that clears the gradient.
        return at is not node and at.attr not in _CLEARS
    return not (isinstance(parent, ast.Compare) and all(isinstance(one, ast.Is | ast.IsNot) for one in parent.ops))
