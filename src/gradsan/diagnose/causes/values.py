"""GS215 and GS216: a value was changed without autograd's knowledge, and used afterwards.

GS215: a value of the graph was changed where autograd does not record, and used afterwards.

GS216: a module's forward, or another function, changed a tensor of its caller's, which then read it again.
"""

from __future__ import annotations

from gradsan import source
from gradsan.diagnose import build, value_fixes
from gradsan.diagnose import labels as label_texts
from gradsan.diagnose.facts import Facts
from gradsan.model import Diagnosis, Message


def no_grad_write(facts: Facts) -> Diagnosis | None:
    """Recognise an operation that used the new value with the graph of the old one."""
    conflict = facts.conflict
    if conflict.bypass != "no_grad_write" or facts.first is None:
        return None
    write = facts.first
    name = _made_as(facts) or facts.name
    values = {"name": name, "op": facts.op, "writer": label_texts.as_written(write.op)}
    recorded = "no_grad" if not write.grad_enabled else "alias"
    is_open = recorded == "no_grad" and conflict.compared is None
    found = build.diagnosis(
        facts,
        "GS215",
        "no_grad_write",
        severity="note" if facts.is_undone else "warning",
        values=values,
        explanation=f"no_grad_write.{recorded}",
        labels=(
            *label_texts.at("note", conflict.alias_site, Message("label.computed_here", values)),
            *label_texts.changed_value(
                facts,
                values,
                written=f"label.not_recorded.{recorded}",
                saved="label.changed_value_used",
                used="label.old_function",
            ),
        ),
        fixes=value_fixes.for_unrecorded(facts, name),
        notes=(Message("note.may_be_unchanged", {"name": name}),) if is_open else (),
    )
    return build.about(found, name)


def _made_as(facts: Facts) -> str | None:
    """The name bound by the statement that computed the value."""
    frame = facts.conflict.alias_site.shown_frame if facts.conflict.alias_site is not None else None
    statement = source.statement_at(frame) if frame is not None else None
    # ``s = scale(v(i)) * 5`` binds another value than that of ``v(i)``.
    if frame is None or statement is None or not source.binds_result(frame):
        return None
    names = source.assigned_names(statement)
    return names[0] if len(names) == 1 else None


def forward_alias(facts: Facts) -> Diagnosis | None:
    """Recognise an argument that was overwritten in a call and read outside of it."""
    conflict = facts.conflict
    if conflict.bypass != "forward_alias" or facts.first is None:
        return None
    write = facts.first
    frame = write.site.shown_frame
    inner = None if frame is None else source.written_expression(frame, write.op, write.site.inner_frames)
    name = conflict.names[0].text if conflict.names else facts.name
    values = {
        "name": name,
        "argument": inner or name,
        "function": "forward" if frame is None else frame.function,
        "op": facts.op,
        "writer": label_texts.as_written(write.op),
    }
    found = build.diagnosis(
        facts,
        "GS216",
        "forward_alias",
        severity="warning",
        values=values,
        labels=label_texts.changed_value(
            facts,
            values,
            written="label.argument_written",
            saved="label.argument_read_again",
            used="label.new_value_used",
        ),
        fixes=value_fixes.for_argument(facts, values),
    )
    return build.about(found, name)
