"""The parts that every diagnosis of a conflict has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gradsan.diagnose import labels as label_room
from gradsan.diagnose.facts import Facts
from gradsan.diagnose.names import producer
from gradsan.model import (
    Diagnosis,
    Fix,
    Gradient,
    Label,
    Message,
    NamedTensor,
    Severity,
    Why,
)


def diagnosis(
    facts: Facts,
    code: str,
    cause: str,
    *,
    values: Mapping[str, Any] | None = None,
    severity: Severity = "error",
    labels: tuple[Label, ...] | None = None,
    fixes: tuple[Fix, ...] = (),
    notes: tuple[Message, ...] = (),
) -> Diagnosis:
    """A diagnosis with the words of ``cause``, the usual labels, and the formula that needs the value."""
    conflict = facts.conflict
    filled = {"name": facts.name, "op": facts.op, "operand": conflict.save.slot or "?", **(values or {})}
    return Diagnosis(
        code=code,
        cause=cause,
        severity=severity,
        silent=not conflict.raised,
        title=Message(f"title.{cause}", filled),
        explanation=Message(f"explanation.{cause}", filled),
        labels=label_room.standard(facts) if labels is None else labels,
        tensor=named_tensor(facts),
        why=why(facts),
        gradient=Gradient("raised" if conflict.raised else "unknown"),
        fixes=fixes,
        notes=(*notes, *_limits(facts)),
        count=conflict.count,
    )


def named_tensor(facts: Facts) -> NamedTensor:
    """The tensor as the report shows it."""
    save = facts.conflict.save
    return NamedTensor(
        name=facts.name if isinstance(facts.name, str) else producer(facts.conflict),
        shape=save.tensor.shape,
        dtype=save.tensor.dtype,
        device=save.tensor.device,
        op=save.node,
        operand=save.slot,
    )


def why(facts: Facts) -> Why | None:
    """The formula that needs the value; None where the operation is not in the table."""
    need = facts.need
    if need is None or not need.formula:
        return None
    key = "why.result" if need.is_output else "why.operand"
    targets = ", ".join(need.gradient_of)
    return Why(
        need.formula, Message(key, {"op": need.op, "formula": need.formula, "target": targets, "name": facts.name})
    )


def _limits(facts: Facts) -> tuple[Message, ...]:
    """What keeps this diagnosis from being complete."""
    notes = []
    if facts.conflict.unexplained and facts.writes:
        notes.append(Message("note.unexplained", {"count": facts.conflict.unexplained}))
    if facts.conflict.log_was_cut:
        notes.append(Message("note.log_was_cut"))
    return tuple(notes)
