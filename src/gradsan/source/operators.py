"""Operators of augmented assignments: their values as expressions, with parentheses where they are needed."""

from __future__ import annotations

import ast

from gradsan.source.tree import SourceFile, Span

_BINDING_STRENGTH: dict[type[ast.operator], int] = {
    getattr(ast, name): strength
    for strength, names in (
        (1, "BitOr"),
        (2, "BitXor"),
        (3, "BitAnd"),
        (4, "LShift RShift"),
        (5, "Add Sub"),
        (8, "Pow"),
    )
    for name in names.split()
} | dict.fromkeys((ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.MatMult), 6)
_UNARY_STRENGTH = 7
_SELF_CONTAINED = (
    *(ast.Name, ast.Attribute, ast.Subscript, ast.Call, ast.Constant, ast.List, ast.Dict, ast.Set),
    *(ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.JoinedStr),
)


def augmented_value(source: SourceFile, node: ast.AugAssign) -> str | None:
    """``x + y`` of ``x += y``; None where the syntax is not supported."""
    target, whole = source.span(node.target), source.span(node)
    between = Span(target.end_line, target.end_column, whole.end_line, whole.end_column)
    operator, equals, value = source.slice(between).lstrip(" \t").partition("=")
    if not equals or operator.strip("+-*/%@&|^<>"):
        return None
    value = value.strip()
    return f"{source.text(node.target)} {operator} {value if _stands_alone(source, node) else f'({value})'}"


def _stands_alone(source: SourceFile, node: ast.AugAssign) -> bool:
    """Whether the right side needs no parentheses after ``x <operator>``: it binds tighter, or has some already."""
    value, whole = source.span(node.value), source.span(node)
    if (value.end_line, value.end_column) != (whole.end_line, whole.end_column):
        return True
    if isinstance(node.value, ast.BinOp):
        return _BINDING_STRENGTH[type(node.value.op)] > _BINDING_STRENGTH[type(node.op)]
    if isinstance(node.value, ast.UnaryOp):
        return not isinstance(node.value.op, ast.Not) and _BINDING_STRENGTH[type(node.op)] != _UNARY_STRENGTH
    if isinstance(node.value, ast.Tuple):
        return source.slice(value).startswith("(")
    return isinstance(node.value, _SELF_CONTAINED)
