"""Operands of the operation that made a non-finite value, with their names by the source; suggested fixes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from gradsan import source
from gradsan.diagnose.failures import parts
from gradsan.diagnose.needs import op_name
from gradsan.model import Birth, Fix, Frame, Operand

_REFLECTED = frozenset({"rtruediv", "rdiv"})
DIVISIONS = _REFLECTED | {"div", "idiv", "truediv", "itruediv", "divide", "true_divide", "fmod", "remainder", "mod"}
_SLOTS = {"self": 0, "other": 1, "exponent": 1}
_OF_OPERATOR = 2
"""Number of operands of ``a / b``."""


def plain(op: str) -> str:
    """The name of an operation without underscores: ``truediv`` of ``__truediv__``."""
    return op.strip("_")


def divisor(op: str, operands: Iterable[Operand]) -> Operand | None:
    """The operand by which a division divides; None where it is a number."""
    positions = ("0",) if op in _REFLECTED else ("1", "other")
    return next((one for one in operands if one.argument in positions), None)


def named(birth: Birth, operand: Operand | None) -> tuple[Birth, Operand | None]:
    """Both by the operand's text in the source where no live variable held it: ``1 - p`` of ``torch.log(1 - p)``."""
    frame = None if birth.site is None else birth.site.user_frame
    if operand is None or operand.name or operand.argument.startswith("grad ") or frame is None:
        return birth, operand
    op = plain(op_name(birth.op))
    is_divisor = op in DIVISIONS and operand == divisor(op, birth.operands)
    if not is_divisor and birth.born != "backward" and len(birth.operands) != 1:
        return birth, operand
    # The name of the birth is that of the first operand which has one.
    own = birth.name if len(birth.operands) == 1 else None
    name = own or source.operand_text(frame, "div" if op in DIVISIONS else op, _position(op, operand.argument))
    return replace(birth, name=birth.name or name), replace(operand, name=name)


def _position(op: str, argument: str) -> int | None:
    """The position in the source of an argument of a call, or of a slot of a Node; None where only one is meant."""
    position = _SLOTS.get(argument, int(argument) if argument.isdigit() else None)
    return 1 - position if op in _REFLECTED and position in (0, 1) else position


def operand_values(operand: Operand | None, birth: Birth) -> dict[str, object]:
    """What messages say of an operand: ``operand`` with its index, ``at``, ``low``, ``high``."""
    if operand is None:
        return {"operand": "?", "at": "?", "low": "?", "high": "?"}
    base = operand.name or _base(operand.argument, birth)
    index = "" if not operand.index else "[" + ", ".join(map(str, operand.index)) + "]"
    if index and " " in base:
        base = f"({base})"
    return {
        "operand": f"{base}{index}",
        "at": operand.at or "?",
        "low": _shown(operand.low),
        "high": _shown(operand.high),
    }


def _base(argument: str, birth: Birth) -> str:
    """A word for an operand without a name: its keyword, its position in the call."""
    if argument.startswith("grad "):
        return "grad"
    # A slot of a Node holds an operand of its operation.
    if birth.born == "backward" or argument == "0" or len(birth.operands) < 2:
        return (birth.born == "backward" and birth.name) or "input"
    # torch's documentation calls the second operand of an operator so.
    is_other = argument == "1" and len(birth.operands) == _OF_OPERATOR
    return "other" if is_other else f"args[{argument}]" if argument.isdigit() else argument


def _shown(number: float | None) -> str:
    return "?" if number is None else f"{number:.6g}"


def range_of(operand: Operand | None) -> tuple[float, float] | None:
    """The smallest and the largest finite element; None where they are not known."""
    if operand is None or operand.low is None or operand.high is None:
        return None
    return operand.low, operand.high


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
