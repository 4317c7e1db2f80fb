"""What stands in the brackets of ``x[…]``, one element for each dimension."""

from __future__ import annotations

import ast

__all__ = ["elements_of", "is_all", "is_gap", "is_number", "may_be_number"]


def elements_of(part: ast.Subscript) -> list[ast.expr]:
    """The elements of the index: ``[a, b]`` of ``x[a, b]``, one of ``x[a]``."""
    return part.slice.elts if isinstance(part.slice, ast.Tuple) else [part.slice]


def is_all(index: ast.expr) -> bool:
    """Whether the element is ``:``."""
    return isinstance(index, ast.Slice) and index.lower is None and index.upper is None and index.step is None


def is_gap(index: ast.expr) -> bool:
    """Whether the element is ``...`` or ``None``, which stand for no dimension or for several."""
    return isinstance(index, ast.Constant) and (index.value is Ellipsis or index.value is None)


def is_number(value: ast.expr) -> bool:
    """Whether an expression is a number written out, with or without a sign."""
    value = value.operand if isinstance(value, ast.UnaryOp) else value
    return (
        isinstance(value, ast.Constant) and isinstance(value.value, int | float) and not isinstance(value.value, bool)
    )


def may_be_number(index: ast.expr) -> bool:
    """Whether an element may be one position; a comparison, a slice or a string is none."""
    if isinstance(index, ast.Constant):
        return isinstance(index.value, int) and not isinstance(index.value, bool)
    return isinstance(index, ast.Name | ast.BinOp | ast.UnaryOp | ast.Subscript | ast.Attribute | ast.Call)
