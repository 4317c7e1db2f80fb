"""Changes after which an operation stays finite, by the cause of the nonfinite value: the likeliest first, not run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from gradsan.model import Frame
from gradsan.source.change import Change
from gradsan.source.rewrite import bounded, reductions
from gradsan.source.rewrite.stable import stable_form

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
