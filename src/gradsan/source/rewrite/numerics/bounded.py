"""Operations kept away from singular points of the function or its derivative: eps inside, a bound, a safe input."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from gradsan.model import Frame
from gradsan.source.change import Change, Edit, edited
from gradsan.source.identifiers import local_nodes
from gradsan.source.imports import torch_name
from gradsan.source.locate import Expression, expression_at
from gradsan.source.rewrite.numerics.applied import Applied, applied, behind, plus, receiver, resolved, scope_of_node
from gradsan.source.tree import SourceFile, Span

_ABOVE_ZERO = frozenset({"log", "log2", "log10", "sqrt", "rsqrt", "pow", "reciprocal", "lgamma", "digamma", "xlogy"})
_WITHIN_ONE = frozenset({"acos", "asin", "atanh", "erfinv"})
_GROWING = frozenset({"exp", "exp2", "expm1", "sinh", "cosh"})
_ROOTS = frozenset({"sqrt", "rsqrt", "pow"})
_SMALL = {"float64": "1e-12", "float16": "1e-4"}
_SMALL_UNDER_ROOT = {"float64": "1e-24", "float16": "1e-6"}
_BESIDE_ONE = {"float64": "1e-12", "float16": "1e-3", "bfloat16": "1e-2"}
_LARGEST_EXPONENT = {"float64": "700", "float16": "10"}
_LONGEST = 40
"""Characters of an operand that is named by its text."""
_COUNTING = frozenset({"sum", "count_nonzero", "numel", "size", "len"})


def bounded_forms(frame: Frame, dtype: str, low: float | None, is_count: bool) -> list[tuple[str, Change]]:
    """Changes of the operation at ``frame``, each with its kind, that keep its input from the singular point.

    ``low`` is the smallest divisor seen in the run, where known: a lower bound is offered only
    where all were 0 or more. ``is_count``: it may be a count, which may be 0.
    """
    found = expression_at(frame)
    one = None if found is None else applied(found.source, found.node)
    if found is None or one is None:
        return []
    source = found.source
    small = _SMALL.get(dtype, "1e-8")
    edits: list[tuple[str, list[Edit]]] = []
    operand = _singular(one)
    if one.op == "div":
        edits += _denominators(source, operand, small, low, is_count)
    elif one.op in _ABOVE_ZERO:
        small = _SMALL_UNDER_ROOT.get(dtype, "1e-12") if one.op in _ROOTS else small
        edits.append(("clamp_input", behind(source, operand, f".clamp_min({small})")))
        edits.append(("eps_inside", plus(source, operand, small)))
    elif one.op in _WITHIN_ONE:
        beside = _BESIDE_ONE.get(dtype, "1e-6")
        edits.append(("clamp_input", behind(source, operand, f".clamp(-1 + {beside}, 1 - {beside})")))
    elif one.op == "logit":
        beside = _BESIDE_ONE.get(dtype, "1e-6")
        edits.append(("clamp_input", behind(source, operand, f".clamp({beside}, 1 - {beside})")))
    elif one.op == "acosh":
        edits.append(("clamp_input", behind(source, operand, f".clamp_min(1 + {_BESIDE_ONE.get(dtype, '1e-6')})")))
    elif one.op == "log1p":
        edits.append(("clamp_input", behind(source, operand, f".clamp_min(-1 + {_BESIDE_ONE.get(dtype, '1e-6')})")))
    elif one.op in _GROWING:
        edits.append(("clamp_input", behind(source, operand, f".clamp_max({_LARGEST_EXPONENT.get(dtype, '80')})")))
    changes = [(kind, edited(source, edit, kind)) for kind, edit in edits]
    return [(kind, change) for kind, change in changes if change is not None]


def operand_text(frame: Frame, op: str, position: int | None) -> str | None:
    """The text of an operand of ``op``, the operation at ``frame``; None where the source does not show it.

    ``position`` counts from the left; None means the operand that has a singular point. A number is none.
    """
    found = expression_at(frame)
    one = None if found is None else applied(found.source, found.node)
    if found is None or one is None or one.op != op:
        return None
    if position is not None and position >= len(one.operands):
        return None
    operand = _singular(one) if position is None else one.operands[position]
    text = found.source.text(operand)
    return None if isinstance(operand, ast.Constant) or "\n" in text or len(text) > _LONGEST else text


def _singular(one: Applied) -> ast.expr:
    """The operand that is at the singular point: the divisor, or the argument of a logarithm."""
    return one.operands[-1] if one.op in ("div", "xlogy") else one.operands[0]


def _denominators(
    source: SourceFile, below: ast.expr, small: str, low: float | None, is_count: bool
) -> Iterator[tuple[str, list[Edit]]]:
    inner = applied(source, resolved(source, below))
    if inner is not None and inner.op in _COUNTING and is_count:
        yield "clamp_count", behind(source, below, ".clamp_min(1)")
    if low is not None and low >= 0:
        yield "nonzero_denominator", behind(source, below, f".clamp_min({small})")
        return
    text = source.text(below)
    chosen = f"{torch_name(source)}.where({receiver(source, below)} == 0, {small}, {text})"
    span = source.span(below)
    yield "nonzero_denominator", [Edit(span, chosen)]


def at_least_one(frame: Frame) -> Change | None:
    """The division at ``frame`` by a plain number, which is sometimes 0, with the divisor bounded below by 1."""
    found = expression_at(frame)
    one = None if found is None else applied(found.source, found.node)
    if found is None or one is None or one.op != "div":
        return None
    below = one.operands[-1]
    return edited(found.source, [Edit(found.source.span(below), f"max({found.source.text(below)}, 1)")], "clamp_count")


def safe_input(frame: Frame) -> Change | None:
    """The operation at ``frame``, whose result a ``where``, a mask or an index uses in part, with a safe input.

    ``torch.where(ok, f(x), other)`` becomes ``torch.where(ok, f(torch.where(ok, x, 1.0)), other)``, and ``f(x)[ok]``
    becomes ``f(x[ok])``.
    """
    found = expression_at(frame)
    one = None if found is None else applied(found.source, found.node)
    if found is None or one is None:
        return None
    source, operand = found.source, _singular(one)
    safe = "0.5" if one.op in _WITHIN_ONE | {"logit"} else "1.0"
    if isinstance(one.node, ast.expr):
        parent, _ = source.parents[one.node]
        if isinstance(parent, ast.Subscript) and parent.value is one.node and len(one.operands) == 1:
            own, whole = source.span(one.node), source.span(parent)
            index = source.lines[whole.end_line - 1][own.end_column - 1 : whole.end_column - 1]
            is_flat = whole.line == whole.end_line == own.end_line
            if is_flat and not any(isinstance(child, ast.Slice) for child in ast.walk(parent.slice)):
                edits = [*behind(source, operand, index), Edit(_tail(source, one.node, parent), "")]
                return edited(source, edits, "double_where")
    scope = scope_of_node(source, found.node)
    if isinstance(scope, ast.Lambda):
        return None
    for node in sorted((one for one in local_nodes(scope) if isinstance(one, ast.Call | ast.BinOp)), key=source.span):
        chosen = _chosen(source, node, found)
        if chosen is not None:
            text = f"{torch_name(source)}.where({chosen[0]}, {source.text(operand)}, {safe})"
            if not chosen[1]:
                text = f"{torch_name(source)}.where({chosen[0]}, {safe}, {source.text(operand)})"
            return edited(source, [Edit(source.span(operand), text)], "double_where")
    return None


def _tail(source: SourceFile, value: ast.expr, whole: ast.Subscript) -> Span:
    """The span of the index of ``value[…]``."""
    own, outer = source.span(value), source.span(whole)
    return Span(own.end_line, own.end_column, outer.end_line, outer.end_column)


def _chosen(source: SourceFile, node: ast.Call | ast.BinOp, origin: Expression) -> tuple[str, bool] | None:
    """The condition under which ``node`` uses the result of ``origin``, and whether it must be true or false."""
    one = applied(source, node)
    if one is None or node is origin.node:
        return None
    if one.op == "where":
        parts = [*one.operands, *one.arguments]
        if len(parts) != 3:
            return None
        condition, first, second = parts if one.function is not None else (parts[1], parts[0], parts[2])
        for branch, must_hold in ((first, True), (second, False)):
            if _contains(source, branch, origin.node):
                known = _text_before(source, condition, origin)
                return None if known is None else (known, must_hold)
    if one.op == "masked_fill" and _contains(source, one.operands[0], origin.node) and one.arguments:
        known = _text_before(source, one.arguments[0], origin)
        return None if known is None else (known, False)
    if one.op == "mul":
        for mask, branch in (one.operands, tuple(reversed(one.operands))):
            if _contains(source, branch, origin.node) and _is_mask(source, mask):
                known = _text_before(source, mask, origin)
                return None if known is None else (f"{known} != 0", True)
    return None


def _contains(source: SourceFile, branch: ast.expr, node: ast.AST) -> bool:
    value = resolved(source, branch)
    return any(one is node for one in ast.walk(value)) or any(
        any(inner is node for inner in ast.walk(resolved(source, one)))
        for one in ast.walk(value)
        if isinstance(one, ast.Name)
    )


def _text_before(source: SourceFile, condition: ast.expr, origin: Expression) -> str | None:
    """The condition as it can be written at ``origin``: all names that it reads must be bound by then."""
    here = source.span(origin.statement)
    for value in (condition, resolved(source, condition)):
        names = [one for one in ast.walk(value) if isinstance(one, ast.Name)]
        made = [resolved(source, one) for one in names]
        if all(one is name or source.span(one) < here for one, name in zip(made, names, strict=True)):
            return source.text(value)
    return None


def _is_mask(source: SourceFile, node: ast.expr) -> bool:
    value = resolved(source, node)
    if isinstance(value, ast.Compare):
        return True
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr in ("float", "to"):
        return _is_mask(source, value.func.value)
    text = source.text(node).lower()
    return any(word in text for word in ("mask", "valid", "active", "known", "present"))
