"""GS601 to GS605: the origin of the first NaN or Inf that reached parameters, gradients or the loss, and its reason."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from typing import Literal, NamedTuple

from gradsan.diagnose import labels as label_texts
from gradsan.diagnose.facts import written_from_outside
from gradsan.diagnose.labels import as_written
from gradsan.diagnose.needs import need_of, op_name
from gradsan.diagnose.nonfinite.operands import DIVISIONS, divisor, fixes, named, operand_values, plain, range_of
from gradsan.model import (
    Birth,
    Diagnosis,
    Gradient,
    Label,
    Message,
    NamedTensor,
    NonFinite,
    NonFiniteFacts,
    Operand,
    Site,
    Why,
)

CODES = {"forward": "GS601", "backward": "GS602", "update": "GS603", "data": "GS604"}
_PATH_SHOWN = 3
_GROWN = 1e3
"""Growth factor of the loss over the last rounds from which on a training is reported as diverging."""

Reason = Literal[
    "overflow",
    "zero_division",
    "domain",
    "all_masked",
    "empty",
    "unwritten",
    "infinite_operand",
    "infinite_derivative",
    "gradient_overflow",
    "zero_times_inf",
    "learning_rate",
    "eps_zero",
    "diverged",
    "given",
    "compiled",
    "plain",
]
_DOMAINS = frozenset(
    {
        *("log", "log2", "log10", "log1p", "sqrt", "rsqrt", "pow", "acos", "asin", "acosh", "atanh", "arccos"),
        *("arcsin", "arccosh", "arctanh", "logit", "lgamma", "digamma", "reciprocal", "erfinv", "xlogy", "log_"),
    }
)
_SOFTMAXES = frozenset({"softmax", "log_softmax", "scaled_dot_product_attention"})
_REDUCTIONS = frozenset(
    {
        *("mean", "nanmean", "var", "std", "var_mean", "std_mean", "cross_entropy_loss", "nll_loss", "nll_loss_nd"),
        *("nll_loss2d", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div", "median"),
        *("binary_cross_entropy", "binary_cross_entropy_with_logits"),
    }
)
_SPREADS = frozenset({"var", "std", "var_mean", "std_mean"})
_PRODUCTS = frozenset(
    {
        *("mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "addr", "linear", "mul", "add", "sub"),
        *("neg", "sum", "mean", "expand", "repeat", "convolution", "exp", "tanh", "sigmoid", "softmax", "log_softmax"),
        *("relu", "gelu", "silu", "embedding", "index", "cumsum", "scaled_dot_product_attention", "mse_loss"),
    }
)
"""Operations whose derivative has no singular point: their backward multiplies and adds finite numbers."""
_SAID_WITHOUT_ELEMENT: frozenset[Reason] = frozenset(
    {"given", "unwritten", "learning_rate", "eps_zero", "diverged", "empty", "all_masked", "gradient_overflow"}
)
COMPILED = "CompiledFunction"
"""Name of a compiled graph's call where the operation inside that made a value is unknown."""
_LARGEST = {"float16": "65504", "bfloat16": "3.39e38", "float32": "3.4e38", "float64": "1.8e308"}


class _Read(NamedTuple):
    """The interpretation of the birth: why the value is not finite, and the operand that decided it."""

    reason: Reason
    operand: Operand | None


def explain(found: NonFinite) -> Diagnosis:
    """The diagnosis of one non-finite value."""
    found = _from_outside(found)
    return _explain_origin(found) if found.seen is None else _explain_notice(found)


def _from_outside(found: NonFinite) -> NonFinite:
    """``found`` with events inside of a compiled graph moved to the call of the compiled function."""
    site = found.birth.site
    return replace(
        found,
        birth=replace(found.birth, site=None if site is None else written_from_outside(site)),
        path=tuple((op, written_from_outside(one)) for op, one in found.path),
    )


def _explain_notice(found: NonFinite) -> Diagnosis:
    """GS605: parameters that became NaN or Inf in a run that was not searched for the origin."""
    birth = found.birth
    values: dict[str, object] = {
        "value": birth.value,
        "steps": found.round,
        "consumer": as_written(found.consumer) if found.consumer else "",
        **_parameter_values(found),
    }
    why = Message(f"why.nonfinite_seen_{found.seen}", values)
    was_searched = found.seen in ("untraced", "other_rank")
    noticed = "seen_gradient" if was_searched else "seen"
    return Diagnosis(
        code="GS605",
        cause="nonfinite_noticed",
        severity="warning",
        silent=True,
        title=Message("title.nonfinite_noticed", values),
        explanation=why,
        labels=(
            *label_texts.at("noticed", found.noticed, Message(f"label.nonfinite_{noticed}", values)),
            *label_texts.at(
                "path", found.consumed, Message(f"label.nonfinite_step_{found.seen}", values), op=found.consumer
            ),
        ),
        gradient=Gradient("wrong"),
        notes=() if was_searched else (Message("note.nonfinite_search"),),
        count=found.count,
        nonfinite=NonFiniteFacts("unknown", "", birth.value, found.round, 0, 0, None, why, found.losses),
    )


def _parameter_values(found: NonFinite) -> dict[str, object]:
    unnamed = Message("label.nonfinite_unnamed", {"count": found.spoilt}) if found.spoilt else "?"
    return {
        "parameters": ", ".join(found.parameters[:_PATH_SHOWN]) or unnamed,
        "more": max(len(found.parameters) - _PATH_SHOWN, 0),
    }


def _explain_origin(found: NonFinite) -> Diagnosis:
    read = _read(found.birth, found.birth.op == found.consumer)
    birth, operand = named(found.birth, read.operand)
    read = read._replace(operand=operand)
    op = _op(birth)
    values = {
        "op": op,
        "value": birth.value,
        "round": found.round,
        "consumer": as_written(found.consumer) if found.consumer else "",
        "name": birth.name or "?",
        **_parameter_values(found),
        "elements": birth.elements,
        "of": birth.of,
        "dtype": birth.dtype,
        "largest": _LARGEST.get(birth.dtype, "?"),
        **operand_values(read.operand, birth),
    }
    why = Message(f"why.nonfinite_{_wording(read, birth)}", values)
    cause = f"nonfinite_{birth.born}"
    labels = tuple(_labels(found, values))
    frame = next((label.frame for label in labels if label.role == "origin"), None)
    diverges = read.reason == "overflow" and _is_diverging(found.losses)
    reason = "diverged" if diverges else read.reason
    return Diagnosis(
        code=CODES[birth.born],
        cause=cause,
        severity="note" if found.reached == "loss" else "error",
        silent=True,
        title=Message(_title(cause, birth), values),
        explanation=Message(f"explanation.nonfinite_reached_{found.reached}", values),
        labels=labels,
        tensor=NamedTensor(birth.name, birth.shape, birth.dtype, birth.device, None, None) if birth.of else None,
        why=Why(_formula(birth), why),
        gradient=Gradient("unknown" if found.reached in ("loss", "stopped") else "wrong"),
        fixes=fixes(birth, reason, read.operand, frame, values),
        notes=_notes(birth, read, diverges, values),
        count=found.count,
        nonfinite=NonFiniteFacts(
            birth.born,
            op,
            birth.value,
            found.round,
            birth.elements,
            birth.of,
            range_of(read.operand),
            why,
            found.losses,
        ),
    )


def _notes(birth: Birth, read: _Read, diverges: bool, values: dict[str, object]) -> tuple[Message, ...]:
    said = {"diverging": diverges, "compiled": read.reason == "compiled", "redrawn": birth.redrawn}
    return tuple(Message(f"note.nonfinite_{key}", values) for key, holds in said.items() if holds)


def _is_diverging(losses: tuple[float, ...]) -> bool:
    """Whether the loss has grown from round to round, and by much."""
    sizes = [abs(loss) for loss in losses]
    grows = all(first < second for first, second in pairwise(sizes))
    return len(sizes) > _PATH_SHOWN and grows and sizes[-1] > _GROWN * sizes[0]


def _op(birth: Birth) -> str:
    """The display name of the operation: ``log`` of ``LogBackward0``, ``/`` of ``__truediv__``."""
    if birth.born in ("backward", "data") and birth.op[:1].isupper():
        return op_name(birth.op)
    return _SYMBOLS.get(plain(birth.op), as_written(birth.op))


_SIGNS = (("truediv", "/"), ("mul", "*"), ("sub", "-"), ("add", "+"), ("pow", "**"))
_SYMBOLS = {f"{reflected}{name}": sign for name, sign in _SIGNS for reflected in ("", "r")}
_SYMBOLS |= {"rdiv": "/", "idiv": "/=", "matmul": "@", "cross_entropy_loss": "cross_entropy"}


def _read(birth: Birth, is_step: bool) -> _Read:
    if birth.op.startswith(COMPILED):
        return _Read("compiled", None)
    if birth.born == "data":
        return _Read("given", None)
    if birth.born == "update" and is_step:
        return _read_update(birth)
    if birth.born == "backward" and birth.op[:1].isupper():
        return _read_gradient(birth)
    return _read_result(birth)


def _read_update(birth: Birth) -> _Read:
    settings = dict(birth.scalars)
    if not _is_finite(settings.get("lr")):
        return _Read("learning_rate", None)
    gradient = next(iter(birth.operands), None)
    if settings.get("eps") in ("0.0", "0") and gradient is not None and gradient.at in ("0", "0.0", "-0"):
        return _Read("eps_zero", gradient)
    return _Read("diverged", gradient)


def _read_gradient(birth: Birth) -> _Read:
    given = next((one for one in birth.operands if one.argument.startswith("grad ")), None)
    kept = next((one for one in birth.operands if not one.argument.startswith("grad ") and one.at is not None), None)
    is_zero = given is not None and given.at is not None and _number(given.at) == 0
    if birth.value == "nan" and is_zero:
        return _Read("zero_times_inf", kept)
    if op_name(birth.op) in _PRODUCTS:
        return _Read("gradient_overflow", given)
    return _Read("infinite_derivative", kept)


def _read_result(birth: Birth) -> _Read:
    op, operands = plain(birth.op), birth.operands
    first = next((one for one in operands if one.at is not None), operands[0] if operands else None)
    if op in {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize", "empty_permuted"}:
        return _Read("unwritten", None)
    if op in DIVISIONS:
        below = divisor(op, operands)
        if below is not None and below.at is not None and _number(below.at) == 0:
            return _Read("zero_division", below)
        zero = next((text for _, text in birth.scalars if _number(text) == 0), None) if below is None else None
        if zero is not None:
            return _Read("zero_division", None if first is None else replace(first, name=zero, index=None, at=zero))
    if op in _SOFTMAXES:
        return _Read("all_masked", first)
    if op in _REDUCTIONS and birth.value == "nan" and all(one.kind is None for one in operands):
        return _Read("empty", first)
    if op in _DOMAINS and not (birth.value == "inf" and op == "pow" and first and _number(first.at or "1") != 0):
        return _Read("domain", first)
    infinite = next((one for one in operands if one.kind == "inf"), None)
    if infinite is not None:
        return _Read("infinite_operand", infinite)
    # Sums of products that overflow in both directions have a difference of nan.
    if birth.value in ("inf", "-inf") or (op_name(op) in _PRODUCTS and operands and _is_near_limit(birth)):
        return _Read("overflow", first)
    return _Read("plain", first)


def _is_near_limit(birth: Birth) -> bool:
    """Whether a product of the operands' values can exceed the range of their dtype."""
    largest = math.prod(max(abs(one.low or 0.0), abs(one.high or 0.0), 1.0) for one in birth.operands)
    limit = _LARGEST.get(birth.dtype)
    return limit is not None and largest * max(1, *(math.prod(one.shape) for one in birth.operands)) > float(limit)


def _title(cause: str, birth: Birth) -> str:
    is_of_infinity = birth.born == "forward" and any(one.kind == "inf" for one in birth.operands)
    return f"title.{cause}_infinite" if is_of_infinity else f"title.{cause}"


def _wording(read: _Read, birth: Birth) -> str:
    """The wording of the reason, by the known facts: with the element, with the range, or without."""
    if read.reason == "empty" and plain(birth.op) in _SPREADS:
        return "too_few"
    if read.reason in _SAID_WITHOUT_ELEMENT:
        return read.reason
    if read.operand is None:
        return "unknown"
    if read.reason == "infinite_operand":
        return read.reason if read.operand.at in ("inf", "-inf") else "infinite_operand_range"
    if read.reason == "overflow" and birth.value == "nan":
        return "overflow_sums"
    if read.operand.at is not None:
        return read.reason
    return f"{read.reason}_range" if read.operand.low is not None and read.reason == "overflow" else "unknown"


def _formula(birth: Birth) -> str | None:
    if birth.born != "backward" or not birth.op[:1].isupper():
        return None
    slots = [one.argument for one in birth.operands if not one.argument.startswith("grad ")]
    need = next((known for slot in slots if (known := need_of(birth.op, slot)) is not None and known.curated), None)
    return None if need is None else need.formula


def _labels(found: NonFinite, values: dict[str, object]) -> Iterable[Label]:
    birth = found.birth
    is_step = birth.op == found.consumer
    key = "label.nonfinite_origin_" + ("forward" if birth.born == "update" and not is_step else birth.born)
    origin = label_texts.at("origin", birth.site, Message(key, values), op=birth.op)
    yield from origin
    seen = {(label.frame.file, label.frame.line) for label in origin}
    ends = {_line(found.noticed), _line(found.consumed)}
    shown = 0
    for op, site in found.path[1:]:
        line = _line(site)
        if line is None or line in seen or line in ends or shown >= _PATH_SHOWN:
            continue
        seen.add(line)
        shown += 1
        on = {**values, "op": _op_of_path(op)}
        yield from label_texts.at("path", site, Message("label.nonfinite_path", on), op=op)
    if birth.born == "update" and is_step:
        return
    yield from label_texts.at("noticed", found.noticed, Message("label.nonfinite_noticed", values))
    if found.consumed is not None and found.consumer is not None:
        yield from label_texts.at(
            "path", found.consumed, Message("label.nonfinite_consumed", values), op=found.consumer
        )


def _op_of_path(op: str) -> str:
    return op_name(op) if op[:1].isupper() and "Backward" in op else _SYMBOLS.get(plain(op), as_written(op))


def _line(site: Site | None) -> tuple[str, int] | None:
    frame = None if site is None else site.user_frame
    return None if frame is None else (frame.file, frame.line)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _is_finite(text: str | None) -> bool:
    return text is None or math.isfinite(_number(text))
