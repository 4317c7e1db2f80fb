"""Changes after which an operation stays finite: by the cause, the likeliest first, not run.

Among them are formulas spelled out that torch has as one stable operation: log_softmax, logsumexp, softplus.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from gradsan.model import Frame
from gradsan.source.change import Change, Edit, edited
from gradsan.source.identifiers import local_nodes
from gradsan.source.imports import torch_name
from gradsan.source.locate import expression_at
from gradsan.source.rewrite.numerics import bounded, reductions
from gradsan.source.rewrite.numerics.applied import (
    Applied,
    applied,
    functional,
    keyword_of,
    receiver,
    resolved,
    same,
    scope_of_node,
    text_of_rest,
)
from gradsan.source.tree import SourceFile

_HALVES = ("float16", "bfloat16")


@dataclass(frozen=True, slots=True)
class FiniteForm:
    """A change of its kind; ``form`` names the replacement operation, where there is one."""

    kind: str
    change: Change
    form: str = ""


def finite_forms(
    frame: Frame,
    reason: str,
    *,
    dtype: str = "float32",
    device: str = "cpu",
    low: float | None = None,
    high: float | None = None,
    is_number: bool = False,
) -> tuple[FiniteForm, ...]:
    """The forms of the operation at ``frame`` that stay finite.

    ``reason`` is why it did not (``domain``, ``zero_division`` …), ``dtype`` that of its result, ``low`` and ``high``
    the smallest and largest number in the singular operand. ``is_number``: the divisor is a plain
    number.
    """
    is_count = low == 0 and (high is None or high.is_integer())
    return tuple(_forms(frame, reason, dtype, device, low, is_count, is_number))


def _forms(
    frame: Frame, reason: str, dtype: str, device: str, low: float | None, is_count: bool, is_number: bool
) -> Iterator[FiniteForm]:
    if reason == "unwritten":
        yield from _one("zeros_instead", reductions.zeros_instead(frame))
        return
    if reason == "all_masked":
        yield from _one("finite_mask", reductions.finite_mask(frame, dtype))
        return
    if reason == "empty":
        yield from _one("without_correction", reductions.without_correction(frame))
        yield from _one("sum_over_count", reductions.sum_over_count(frame))
        return
    if reason == "zero_times_inf":
        yield from _one("double_where", bounded.safe_input(frame))
    stable = stable_form(frame)
    if stable is not None:
        yield FiniteForm("stable_form", stable.change, stable.form)
    if is_number:
        yield from _one("clamp_count", bounded.at_least_one(frame))
        return
    if reason in ("infinite_derivative", "plain"):
        yield from _one("double_where", bounded.safe_input(frame))
    if reason in ("overflow", "plain") and dtype in _HALVES:
        for change in reductions.in_float32(frame, device):
            yield FiniteForm("float32_operation", change)
    for kind, change in bounded.bounded_forms(frame, dtype, low, is_count):
        yield FiniteForm(kind, change)


def _one(kind: str, change: Change | None) -> Iterator[FiniteForm]:
    if change is not None:
        yield FiniteForm(kind, change)


class Stable(NamedTuple):
    """A change, and the torch operation that it uses."""

    change: Change
    form: str


class _Form(NamedTuple):
    """The replacement of an expression, its operation, and the argument of the formula."""

    text: str
    name: str
    of: ast.expr


class _Reading:
    """One attempt to read an expression as a formula; ``parts`` are the operations in it."""

    def __init__(self, source: SourceFile) -> None:
        self.source = source
        self.parts: list[ast.AST] = []

    def op(self, node: ast.expr, *names: str) -> Applied | None:
        """The operation that ``node`` stands for, where it is one of ``names``."""
        one = applied(self.source, resolved(self.source, node))
        if one is None or one.op not in names:
            return None
        self.parts.append(one.node)
        return one

    def text(self, node: ast.expr) -> str:
        """The source of ``node``."""
        return self.source.text(node)


_Rule = Callable[[_Reading, ast.expr], _Form | None]


def stable_form(frame: Frame) -> Stable | None:
    """The formula that contains the operation at ``frame``, as the one operation that torch has for it.

    Names are replaced by the values that the same function binds to them. Where the function writes the same formula of
    the same value several times (``log(p)`` and ``log(1 - p)``), all of them are changed.
    """
    found = expression_at(frame)
    if found is None:
        return None
    source, origin = found.source, found.node
    scope = scope_of_node(source, origin)
    if isinstance(scope, ast.Lambda):
        nodes = [node for node in ast.walk(scope.body) if isinstance(node, ast.expr)]
    else:
        nodes = [node for node in local_nodes(scope) if isinstance(node, ast.expr)]
    # A name's formula is changed where the name is bound.
    nodes = sorted((node for node in nodes if not isinstance(node, ast.Name)), key=source.span)
    for rule in _RULES:
        forms: list[tuple[ast.expr, _Form]] = []
        wanted: _Form | None = None
        for node in nodes:
            reading = _Reading(source)
            form = rule(reading, node)
            if form is not None:
                forms.append((node, form))
                if any(part is origin for part in reading.parts):
                    wanted = wanted or form
        if wanted is not None:
            alike = [(node, form) for node, form in forms if same(source, form.of, wanted.of)]
            edits = [Edit(source.span(node), form.text) for node, form in _apart(source, alike)]
            change = edited(source, edits, "stable_form")
            return None if change is None else Stable(change, wanted.name)
    return None


def _apart(source: SourceFile, forms: list[tuple[ast.expr, _Form]]) -> list[tuple[ast.expr, _Form]]:
    """The forms that do not lie within another."""
    return [
        (node, form)
        for node, form in forms
        if not any(other is not node and source.span(other).contains(source.span(node)) for other, _ in forms)
    ]


def _log_softmax(reading: _Reading, node: ast.expr) -> _Form | None:
    log = reading.op(node, "log")
    inner = None if log is None else reading.op(log.operands[0], "softmax")
    return None if inner is None else _renamed(reading, inner, "log_softmax")


def _renamed(reading: _Reading, one: Applied, name: str) -> _Form:
    """``one`` with another operation of the same arguments."""
    operand, rest = one.operands[0], text_of_rest(reading.source, one)
    if one.function is None:
        text = f"{receiver(reading.source, operand)}.{name}({rest.removeprefix(', ')})"
    else:
        prefix = f"{one.function}." if one.function else f"{functional(reading.source)}."
        text = f"{prefix}{name}({reading.text(operand)}{rest})"
    return _Form(text, name, operand)


def _log_sigmoid(reading: _Reading, node: ast.expr) -> _Form | None:
    log = reading.op(node, "log", "log1p")
    if log is None:
        return None
    argument = log.operands[0]
    if log.op == "log1p":
        negated = reading.op(argument, "neg")
        inner, sign = (None if negated is None else reading.op(negated.operands[0], "sigmoid")), "-"
    else:
        rest = _one_minus(reading, argument)
        inner, sign = reading.op(argument if rest is None else rest, "sigmoid"), "" if rest is None else "-"
    if inner is None:
        return None
    operand = inner.operands[0]
    text = receiver(reading.source, operand) if sign else reading.text(operand)
    return _Form(f"{functional(reading.source)}.logsigmoid({sign}{text})", "logsigmoid", operand)


def _one_minus(reading: _Reading, node: ast.expr) -> ast.expr | None:
    """``x`` of ``1 - x``."""
    one = reading.op(node, "sub")
    return one.operands[1] if one is not None and _is(one.operands[0], 1) else None


def _logsumexp(reading: _Reading, node: ast.expr) -> _Form | None:
    log = reading.op(node, "log")
    total = None if log is None else reading.op(log.operands[0], "sum")
    exp = None if total is None else reading.op(total.operands[0], "exp")
    if exp is None or total is None or keyword_of(total, "dtype") is not None:
        return None
    operand, torch = exp.operands[0], torch_name(reading.source)
    rest = text_of_rest(reading.source, total)
    given = f"{reading.text(operand)}{rest}" if rest else f"{receiver(reading.source, operand)}.flatten(), 0"
    return _Form(f"{torch}.logsumexp({given})", "logsumexp", operand)


def _softmax(reading: _Reading, node: ast.expr) -> _Form | None:
    whole = reading.op(node, "div")
    if whole is None:
        return None
    above, total = reading.op(whole.operands[0], "exp"), reading.op(whole.operands[1], "sum")
    below = None if total is None else reading.op(total.operands[0], "exp")
    if (
        above is None
        or below is None
        or total is None
        or not same(reading.source, above.operands[0], below.operands[0])
    ):
        return None
    dim = keyword_of(total, "dim") or next(iter(total.arguments), None)
    keeps = keyword_of(total, "keepdim") or next(iter(total.arguments[1:]), None)
    if dim is None or not _is(keeps, True):
        return None
    operand = above.operands[0]
    name = torch_name(reading.source)
    return _Form(f"{name}.softmax({reading.text(operand)}, {reading.text(dim)})", "softmax", operand)


def _softplus(reading: _Reading, node: ast.expr) -> _Form | None:
    log = reading.op(node, "log", "log1p")
    if log is None:
        return None
    argument: ast.expr | None = log.operands[0]
    if log.op == "log":
        argument = _one_plus(reading, log.operands[0])
    exp = None if argument is None else reading.op(argument, "exp")
    if exp is None:
        return None
    operand = exp.operands[0]
    return _Form(f"{functional(reading.source)}.softplus({reading.text(operand)})", "softplus", operand)


def _one_plus(reading: _Reading, node: ast.expr) -> ast.expr | None:
    """``x`` of ``1 + x`` and ``x + 1``."""
    one = reading.op(node, "add")
    if one is None:
        return None
    first, second = one.operands
    return second if _is(first, 1) else first if _is(second, 1) else None


def _sigmoid(reading: _Reading, node: ast.expr) -> _Form | None:
    whole = reading.op(node, "div")
    below = None if whole is None else _one_plus(reading, whole.operands[1])
    exp = None if below is None else reading.op(below, "exp")
    if whole is None or exp is None:
        return None
    above, inner = reading.op(whole.operands[0], "exp"), exp.operands[0]
    name = torch_name(reading.source)
    if above is not None and same(reading.source, above.operands[0], inner):
        return _Form(f"{name}.sigmoid({reading.text(inner)})", "sigmoid", inner)
    negated = reading.op(inner, "neg")
    if negated is None or not _is(whole.operands[0], 1):
        return None
    return _Form(f"{name}.sigmoid({reading.text(negated.operands[0])})", "sigmoid", inner)


def _with_logits(reading: _Reading, node: ast.expr) -> _Form | None:
    loss = reading.op(node, "binary_cross_entropy")
    inner = None if loss is None else reading.op(loss.operands[0], "sigmoid")
    if loss is None or inner is None or not loss.function:
        return None
    name, operand = "binary_cross_entropy_with_logits", inner.operands[0]
    text = f"{loss.function}.{name}({reading.text(operand)}{text_of_rest(reading.source, loss)})"
    return _Form(text, name, operand)


def _xlogy(reading: _Reading, node: ast.expr) -> _Form | None:
    whole = reading.op(node, "mul")
    if whole is None:
        return None
    for factor, other in (whole.operands, reversed(whole.operands)):
        log = reading.op(other, "log")
        if log is not None:
            inner = log.operands[0]
            text = f"{torch_name(reading.source)}.xlogy({reading.text(factor)}, {reading.text(inner)})"
            return _Form(text, "xlogy", inner)
    return None


def _vector_norm(reading: _Reading, node: ast.expr) -> _Form | None:
    root = reading.op(node, "sqrt", "pow")
    if root is None or (root.op == "pow" and not _is(root.operands[1], 0.5)):
        return None
    total = reading.op(root.operands[0], "sum")
    squared = None if total is None else _square(reading, total.operands[0])
    if total is None or squared is None or keyword_of(total, "dtype") is not None:
        return None
    dim = "".join(f", dim={reading.text(one)}" for one in total.arguments[:1])
    keeps = "".join(f", keepdim={reading.text(one)}" for one in total.arguments[1:2])
    keywords = "".join(f", {one.arg}={reading.text(one.value)}" for one in total.keywords)
    name = torch_name(reading.source)
    return _Form(f"{name}.linalg.vector_norm({reading.text(squared)}{dim}{keeps}{keywords})", "vector_norm", squared)


def _square(reading: _Reading, node: ast.expr) -> ast.expr | None:
    """``x`` of ``x ** 2``, ``x.square()`` and ``x * x``."""
    one = reading.op(node, "pow", "square", "mul")
    if one is None or (one.op == "pow" and not _is(one.operands[1], 2)):
        return None
    is_square = one.op != "mul" or same(reading.source, *one.operands)
    return one.operands[0] if is_square else None


def _normalize(reading: _Reading, node: ast.expr) -> _Form | None:
    whole = reading.op(node, "div")
    norm = None if whole is None else reading.op(whole.operands[1], "norm", "vector_norm")
    if whole is None or norm is None or not same(reading.source, whole.operands[0], norm.operands[0]):
        return None
    order = keyword_of(norm, "p") or keyword_of(norm, "ord") or next(iter(norm.arguments), None)
    dim = keyword_of(norm, "dim") or next(iter(norm.arguments[1:]), None)
    keeps = keyword_of(norm, "keepdim") or next(iter(norm.arguments[2:]), None)
    if (order is not None and not _is(order, 2)) or dim is None or not _is(keeps, True):
        return None
    operand = whole.operands[0]
    text = f"{functional(reading.source)}.normalize({reading.text(operand)}, dim={reading.text(dim)})"
    return _Form(text, "normalize", operand)


def _log_of_product(reading: _Reading, node: ast.expr) -> _Form | None:
    log = reading.op(node, "log")
    product = None if log is None else reading.op(log.operands[0], "prod")
    if product is None:
        return None
    operand, rest = product.operands[0], text_of_rest(reading.source, product).removeprefix(", ")
    name = torch_name(reading.source)
    return _Form(f"{name}.log({reading.text(operand)}).sum({rest})", "log", operand)


def _deviation(reading: _Reading, node: ast.expr) -> _Form | None:
    root = reading.op(node, "sqrt")
    spread = None if root is None else reading.op(root.operands[0], "var")
    return None if spread is None else _renamed(reading, spread, "std")


def _is(node: ast.expr | None, value: float | bool) -> bool:
    if not isinstance(node, ast.Constant) or isinstance(node.value, str | bytes):
        return False
    return node.value == value and isinstance(node.value, bool) == isinstance(value, bool)


_RULES: tuple[_Rule, ...] = (
    _log_softmax,
    _log_sigmoid,
    _softplus,
    _logsumexp,
    _softmax,
    _sigmoid,
    _with_logits,
    _log_of_product,
    _deviation,
    _vector_norm,
    _normalize,
    _xlogy,
)
