"""Common parts of every conflict's diagnosis."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gradsan.diagnose import labels as label_texts
from gradsan.diagnose.facts import Facts, writing_thread
from gradsan.diagnose.names import inputs_with_names, producer
from gradsan.model import (
    Conflict,
    Deviation,
    Diagnosis,
    Fix,
    Gradient,
    Label,
    Message,
    NamedTensor,
    Severity,
    TensorInfo,
    Why,
)

_ERRORS_SHOWN = 5
COLLECTED = "note.one_tensor_collected"
"""The key of the note that a container holds the written tensor several times."""


def diagnosis(
    facts: Facts,
    code: str,
    cause: str,
    *,
    values: Mapping[str, Any] | None = None,
    title: str | None = None,
    explanation: str | None = None,
    severity: Severity = "error",
    labels: tuple[Label, ...] | None = None,
    fixes: tuple[Fix, ...] = (),
    notes: tuple[Message, ...] = (),
) -> Diagnosis:
    """A diagnosis with the words of ``cause``, the usual labels, and the formula that needs the value.

    ``title`` and ``explanation`` are the keys of other words than the usual ones.
    """
    conflict = facts.conflict
    filled = {"name": facts.name, "op": facts.op, "operand": conflict.save.slot or "?", **(values or {})}
    return Diagnosis(
        code=code,
        cause=cause,
        severity=_severity(conflict, severity),
        silent=not conflict.raised and conflict.healed_bytes is None,
        title=Message(f"title.{title or cause}", filled),
        explanation=Message(f"explanation.{explanation or cause}", filled),
        labels=label_texts.standard(facts) if labels is None else labels,
        tensor=named_tensor(facts),
        why=why(facts),
        gradient=gradient(conflict),
        fixes=(*fixes, *_leave_uncompiled(facts)),
        notes=(*notes, *_collected(facts), *_measured(conflict), *_limits(facts)),
        count=conflict.count,
    )


def _collected(facts: Facts) -> tuple[Message, ...]:
    """The note on a list collected over iterations whose elements are all the one written tensor."""
    within = facts.conflict.collected_in
    return () if within is None else (Message(COLLECTED, {"collected": within, "name": facts.name}),)


def _leave_uncompiled(facts: Facts) -> tuple[Fix, ...]:
    """The fix without the compiler, where the eager program has no conflict."""
    save = facts.conflict.save
    frame = save.site.shown_frame
    if save.compiled not in _ONLY_COMPILED or frame is None:
        return ()
    function = Message("help.leave_uncompiled", {"function": frame.function})
    return (Fix(kind="outside_of_compile", meaning="preserved", summary=function, applicability="manual"),)


_ONLY_COMPILED = {"again": "note.kept_again", "only": "note.kept_only_in_compiled"}


def _severity(conflict: Conflict, severity: Severity) -> Severity:
    """The severity in this run: an error that was healed is a warning, one that changes no gradient a note.

    Where PyTorch has stopped the program it is an error in any case.
    """
    if severity != "error" or conflict.raised:
        return severity
    if _is_harmless(conflict):
        return "note"
    return "error" if conflict.healed_bytes is None else "warning"


def _is_harmless(conflict: Conflict) -> bool:
    """Whether it was measured that every gradient is the same as with the saved value."""
    return conflict.deviation is not None and not conflict.deviation.errors


def about(found: Diagnosis, name: str | Message) -> Diagnosis:
    """A diagnosis of a value used after it was changed: its name, and no formula that needs the old one."""
    tensor = found.tensor
    if tensor is not None and isinstance(name, str):
        tensor = replace(tensor, name=name)
    return replace(found, tensor=tensor, why=None)


def gradient(conflict: Conflict) -> Gradient:
    """The measured effect on the gradient."""
    return replace(_as_written(conflict), if_meant=conflict.if_meant)


def _as_written(conflict: Conflict) -> Gradient:
    error = None if conflict.deviation is None else conflict.deviation.largest
    if conflict.use.via == "write":
        return Gradient("unknown", error)
    if conflict.raised:
        return Gradient("raised", error)
    if conflict.healed_bytes is not None or conflict.unchanged:
        return Gradient("right", error)
    if error is None:
        return Gradient("unknown")
    return Gradient("wrong" if error else "right", error)


def _measured(conflict: Conflict) -> tuple[Message, ...]:
    """The notes on deep mode's comparisons and on heal mode's replacements."""
    notes = []
    if conflict.change is not None:
        change = conflict.change
        samples = "; ".join(f"{list(place)}: {old} -> {new}" for place, old, new in change.samples)
        values = {"count": change.changed, "total": change.total, "samples": samples}
        notes.append(Message("note.bytes_changed", values))
    if conflict.deviation is not None and conflict.deviation.errors:
        errors = ", ".join(f"{name} {error:.2g}" for name, error in conflict.deviation.errors[:_ERRORS_SHOWN])
        notes.append(Message("note.gradient_errors", {"errors": errors}))
    if conflict.if_meant is not None:
        notes.append(if_meant(conflict.if_meant))
    if _is_harmless(conflict):
        notes.append(Message("note.gradients_unaffected"))
    if conflict.healed_bytes is not None:
        notes.append(Message("note.healed", {"bytes": conflict.healed_bytes}))
    return tuple(notes)


def if_meant(deviation: Deviation) -> Message:
    """The note on the gradients' error relative to those of the presumed intention."""
    errors = ", ".join(f"{name} {error:.2g}" for name, error in deviation.errors[:_ERRORS_SHOWN])
    return Message("note.if_meant", {"errors": errors})


def named_tensor(facts: Facts) -> NamedTensor:
    """The tensor as the report shows it."""
    save = facts.conflict.save
    shape, is_transposed = save.tensor.shape, facts.name_kind == "parameter" and _is_transposed(save.tensor)
    return NamedTensor(
        name=facts.name if isinstance(facts.name, str) else _producer(facts),
        shape=shape[::-1] if is_transposed else shape,
        dtype=save.tensor.dtype,
        device=save.tensor.device,
        op=save.node,
        operand=save.slot,
        transposed=is_transposed,
    )


def _is_transposed(tensor: TensorInfo) -> bool:
    """Whether the saved tensor is the transposed view of a matrix, as linear saves its weight."""
    shape, strides = tensor.region.shape, tensor.region.strides
    return len(shape) == 2 and strides == (1, shape[0]) and shape != (1, 1)


def _producer(facts: Facts) -> str | None:
    """The operation that made an unnamed value; inside a compiled graph the call, whose result is another tensor."""
    name = producer(facts.conflict)
    return f"{name}(…)" if facts.in_compiled and name is not None else name


def why(facts: Facts) -> Why | None:
    """The formula that needs the value; None where the operation is not in the table."""
    need = facts.need
    if need is None or not need.formula:
        return None
    key = "why.result" if need.is_output else "why.operand"
    values = {
        "op": need.op,
        "formula": need.formula,
        "target": inputs_with_names(facts.conflict, need, need.shown),
        "name": facts.name,
    }
    others = [name for name in need.gradient_of if name not in need.shown]
    if others:
        key, values = f"{key}_and_others", {**values, "others": inputs_with_names(facts.conflict, need, others)}
    return Why(need.formula, Message(key, values))


def _limits(facts: Facts) -> tuple[Message, ...]:
    """The notes on facts missing from this diagnosis."""
    notes = []
    if facts.conflict.use.via == "write":
        notes.append(Message("note.found_at_write", {"name": facts.name}))
    if (elsewhere := writing_thread(facts)) is not None:
        notes.append(Message("note.other_thread", {"name": facts.name, "function": elsewhere}))
    if facts.is_undone:
        notes.append(Message("note.same_but_for_rounding", {"name": facts.name}))
    if facts.may_be_undone:
        notes.append(Message("note.may_be_undone", {"name": facts.name}))
    if facts.conflict.save.compiled in _ONLY_COMPILED:
        notes.append(Message(_ONLY_COMPILED[facts.conflict.save.compiled], {"name": facts.name}))
    if facts.in_compiled and not facts.updates:
        notes.append(Message("note.in_compiled", {"op": facts.op, "name": facts.name}))
    if facts.conflict.unexplained and facts.writes:
        notes.append(Message("note.unexplained", {"count": facts.conflict.unexplained}))
    if facts.conflict.log_was_cut:
        notes.append(Message("note.log_was_cut"))
    return tuple(notes)
