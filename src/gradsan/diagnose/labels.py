"""Labels of a diagnosis, in the order of events."""

from __future__ import annotations

import ast
import itertools
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import partial

from gradsan import source
from gradsan.diagnose.array_writes import writers
from gradsan.diagnose.facts import Facts, goes_on_at
from gradsan.diagnose.names import inputs_in_words
from gradsan.model import Frame, Label, Message, Role, Site, Write

_ASSIGNMENT = "[...] ="
_TARGETS_NAMED = 3
"""Number of inputs whose gradients need the value that a label names; of more it names one."""

_LONGEST_ASSIGNMENT = 36
"""Characters of a target and a value that are shown; a longer value is left out."""

_SIGNS = "add=+ and=& div=/ floordiv=// lshift=<< mod=% mul=* or=| pow=** rshift=>> sub=- truediv=/ xor=^"
_AUGMENTED = {f"__i{name}__": f"{sign}=" for name, sign in (one.split("=") for one in _SIGNS.split())}
_OPERATORS = {**_AUGMENTED, "__setitem__": _ASSIGNMENT}


def standard(facts: Facts, *, writes: Iterable[Write] | None = None, used: Message | None = None) -> tuple[Label, ...]:
    """Labels saved, written (each line once, with its count), used; ``writes`` and ``used`` replace the usual ones."""
    shown = facts.writes if writes is None else tuple(writes)
    return (
        *saved(facts),
        *written(facts, shown),
        *at("used", facts.conflict.use.site, used or _used(facts), op=facts.conflict.use.via),
    )


def at(role: Role, site: Site | None, message: Message, op: str | None = None) -> tuple[Label, ...]:
    """A label at a site's user frame; empty where the site has no frame."""
    frame = site.shown_frame if site is not None else None
    return () if site is None or frame is None else (Label(role, frame, message, op, site),)


def saved(facts: Facts) -> tuple[Label, ...]:
    """The label where autograd saved the value."""
    save, need = facts.conflict.save, facts.need
    values = {"name": facts.name, "op": facts.op, "operand": save.slot or "?", "step": save.step}
    if need is not None and need.gradient_of:
        key = "label.saved.result" if save.is_output else "label.saved.operand"
        inputs = partial(inputs_in_words, facts.conflict, need, op=facts.op)
        if len(need.gradient_of) > _TARGETS_NAMED:
            key = f"{key}_and_more"
            values |= {"target": inputs(need.shown[:1]), "more": len(need.gradient_of) - 1}
        else:
            values["target"] = inputs(need.gradient_of)
    else:
        key = "label.saved.in_compiled" if facts.in_compiled else "label.saved.plain"
    return at("saved", save.site, _in_step(facts, Message(key, values), save.step), op=save.node)


def written(facts: Facts, writes: Iterable[Write]) -> tuple[Label, ...]:
    """The labels where the value was overwritten: each source line once, in order of its first write."""
    by_line: dict[tuple[str, int], tuple[Frame, list[Write]]] = {}
    for write in writes:
        frame = write.site.shown_frame
        if frame is not None:
            by_line.setdefault((frame.file, frame.line), (frame, []))[1].append(write)
    labels: list[Label] = []
    for frame, group in by_line.values():
        first = group[0]
        save = facts.conflict.save
        since = None if first.clock > save.clock else save.site
        is_outside = first.kind == "outside"
        found = is_outside and by_array(first.op, first.site, {"name": facts.name}, since, facts.conflict.use.site)
        if found:
            labels += found
            continue
        ops = Counter(write.op for write in group)
        if first.kind == "step":
            message = Message("label.written.step", {"optimizer": first.optimizer, "name": facts.name})
        else:
            # For memory shared outside of PyTorch the log has the site of the export, not of the write.
            key = "label.written.outside" if first.kind == "outside" else "label.written.op"
            if first.clock in facts.by_compiled:
                key = f"label.written.{'after_break' if goes_on_at(first.site) else 'in_compiled'}"
            message = Message(key, {"name": facts.name, "op": _in_source(frame, ops)})
        times = max(ops.values())
        if times > 1:
            message = Message("label.counted", {"what": message, "count": times})
        labels += at("written", first.site, _in_step(facts, message, first.step), op=first.op)
    return tuple(labels)


def by_array(
    op: str | None, site: Site, values: Mapping[str, object], save: Site | None, use: Site
) -> tuple[Label, ...]:
    """The labels of memory that was handed out, and of the statements that certainly wrote it; none without these."""
    found = writers(op, site, save, use)
    labels = [*at("note", site, Message("label.handed_out", {**values, "op": op}))] if found else []
    for array, place in found:
        labels += at("written", place, Message("label.written.by_array", {**values, "array": array}), op=op)
    return tuple(labels)


def changed_value(
    facts: Facts, values: Mapping[str, object], *, written: str, saved: str, used: str
) -> tuple[Label, ...]:
    """Each write of a value, the read of the changed value, and its backward; the last three are message keys."""
    conflict = facts.conflict
    writes = (
        (write.kind == "outside" and by_array(write.op, write.site, values, None, conflict.save.site))
        or at("written", write.site, Message(written, {**values, "writer": as_written(write.op)}), op=write.op)
        for write in facts.writes
    )
    return (
        *itertools.chain.from_iterable(writes),
        *at("saved", conflict.save.site, Message(saved, values), op=conflict.save.node),
        *at("used", conflict.use.site, Message(used, values), op=conflict.use.via),
    )


def as_written(op: str | None) -> str:
    """The writing operation as spelled in source: a special method of Python's as its operator."""
    return "?" if op is None else _OPERATORS.get(op, op)


def all_as_written(ops: Iterable[str]) -> list[str]:
    """The writing operations. ``x[i] += y`` ends with an assignment, which is left out."""
    shown = [as_written(op) for op in ops]
    return [op for op in shown if op != _ASSIGNMENT or not any(other in _AUGMENTED.values() for other in shown)]


def _in_source(frame: Frame, ops: Iterable[str]) -> str:
    """The writing operation at ``frame``; for an assignment to a part its source text."""
    shown = ", ".join(all_as_written(ops))
    statement = source.statement_at(frame) if shown == _ASSIGNMENT else None
    if statement is None or not isinstance(statement.node, ast.Assign) or len(statement.node.targets) != 1:
        return shown
    target, value = (statement.source.text(node) for node in (statement.node.targets[0], statement.node.value))
    if len(target) + len(value) > _LONGEST_ASSIGNMENT:
        value = "…"
    return f"`{target} = {value}`" if len(target) <= _LONGEST_ASSIGNMENT and "\n" not in f"{target}{value}" else shown


def update_name(facts: Facts, update: Write) -> str | Message:
    """The name of a parameter's update: ``Adam.step``, or words for a compiled graph or for a manual update."""
    if update.clock in facts.by_compiled:
        return Message("label.update_in_compiled")
    return update.op if update.kind == "step" else Message("label.update_by_hand", {"op": as_written(update.op)})


def _used(facts: Facts) -> Message:
    use = facts.conflict.use
    return _in_step(facts, Message("label.used", {"op": facts.op}), use.step)


def _in_step(facts: Facts, message: Message, step: int) -> Message:
    """``message`` with its step, where the events are in different ones."""
    conflict = facts.conflict
    steps = {conflict.save.step, conflict.use.step, *(write.step for write in facts.writes)}
    return Message("label.in_step", {"what": message, "step": step}) if len(steps) > 1 else message
