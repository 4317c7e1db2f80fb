"""Suggested fixes for NaN and Inf: the changed line where the source allows one, else advice in words."""

from __future__ import annotations

from collections.abc import Mapping

from gradsan import source
from gradsan.diagnose.failures import parts
from gradsan.model import Birth, Fix, Frame, Operand

_HELP = {
    "overflow": "nonfinite_overflow",
    "zero_division": "nonfinite_denominator",
    "domain": "nonfinite_domain",
    "all_masked": "nonfinite_mask",
    "empty": "nonfinite_empty",
    "unwritten": "nonfinite_unwritten",
    "infinite_derivative": "nonfinite_inside",
    "gradient_overflow": "nonfinite_gradient",
    "zero_times_inf": "nonfinite_double_where",
    "learning_rate": "nonfinite_rate",
    "eps_zero": "nonfinite_eps",
    "diverged": "nonfinite_diverged",
    "given": "nonfinite_data",
}
_TRIED_AS = {"nonfinite_eps": "positive_eps", "nonfinite_data": "drop_rows"}
"""The kind of the fix with lines that a search tries, by the kind of the advice."""
_NOT_AT_THE_LINE = frozenset({"gradient_overflow", "learning_rate", "eps_zero", "diverged", "given"})


def fixes(
    birth: Birth, reason: str, operand: Operand | None, frame: Frame | None, values: Mapping[str, object]
) -> tuple[Fix, ...]:
    """The fixes for ``birth`` with ``reason``; ``operand`` decided it, ``frame`` is the origin's line."""
    found: list[Fix] = []
    for form in _forms(birth, reason, operand, frame):
        lines = source.changed_lines(frame.file, form.change) if frame is not None else ()
        if lines:
            filled = {**values, "form": form.form}
            found.append(parts.fix(form.kind, "changed", filled, lines=lines, summary=f"help.finite_{form.kind}"))
    if found:
        return tuple(found)
    kind = _HELP.get(reason)
    if kind is None:
        return ()
    return (parts.fix(_TRIED_AS.get(kind, kind), "changed", values, summary=f"help.{kind}"),)


def _forms(birth: Birth, reason: str, operand: Operand | None, frame: Frame | None) -> tuple[source.FiniteForm, ...]:
    if frame is None or reason in _NOT_AT_THE_LINE:
        return ()
    is_number = reason == "zero_division" and len(birth.operands) < 2 and _divides_by_zero(birth)
    return source.finite_forms(
        frame,
        reason,
        dtype=birth.dtype,
        device=birth.device.partition(":")[0],
        low=None if operand is None else operand.low,
        high=None if operand is None else operand.high,
        is_number=is_number,
    )


def _divides_by_zero(birth: Birth) -> bool:
    return any(text in ("0", "0.0", "-0.0") for _, text in birth.scalars)
