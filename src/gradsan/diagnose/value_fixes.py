"""Suggested fixes for changed values, checkpointed functions and custom Functions. None of them was run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gradsan import source
from gradsan.diagnose.carriers import Carrier
from gradsan.diagnose.facts import Facts
from gradsan.model import Fix, Frame, Lines, Message, Site

LEFT_UNRECORDED = "help.left_unrecorded_how"
"""Message key of a change that fixes the gradient of the saved value, and leaves the write without one."""
LEFT_CONSTANT = "help.left_constant_how"
"""Message key of a change that leaves a gradient without a graph: nothing is learnt through it."""
TRAINED_BY_BOTH, NOT_BY_BOTH = "help.trained_by_both_how", "help.not_by_both_how"
"""Message keys of changes after which a loss also trains what only another optimizer has, and after which it no longer
does, where either may be meant."""


def for_unrecorded(facts: Facts, name: str | Message) -> tuple[Fix, ...]:
    """Let autograd record the change, or change a copy of the value."""
    values = {"name": name}
    if found := recorded_by_name(facts):
        return (*found, Fix.worded("help.change_a_copy", values))
    if facts.first is not None and not facts.first.grad_enabled:
        return (Fix.worded("help.record_the_change", values), Fix.worded("help.change_a_copy", values))
    return (Fix.worded("help.change_a_copy", values), Fix.worded("help.record_the_change", values))


def recorded(facts: Facts, name: str | Message) -> tuple[Fix, ...]:
    """Compute a new tensor where the old one was written past autograd."""
    if found := recorded_by_name(facts):
        return found
    frame, write = _written_at(facts), facts.first
    change = None if frame is None or write is None else source.recorded(frame, write.op)
    places = {(one.user_frame.file, one.user_frame.line) for one in _sites(facts) if one.user_frame is not None}
    if change is None or frame is None or change.notes or len(places) != 1:
        return (Fix.worded("help.record_the_change", {"name": name}),)
    return (Fix.worded("help.record_the_change", {"name": name}, source.changed_lines(frame.file, change)),)


def recorded_by_name(facts: Facts) -> tuple[Fix, ...]:
    """The same for all writes, where the source shows the tensor's own name for each of them; else empty.

    Rounded values have no derivative: there the gradient of the value before is meant.
    """
    written = [(frame, write.op) for write in facts.writes or facts.missed if (frame := write.site.shown_frame)]
    lines = () if any(source.makes_discrete(frame) for frame, _ in written) else source.recorded_by_name(written)
    name = lines[-1][2].partition(" = ")[0].strip() if lines else ""
    return (Fix.worded("help.record_the_change", {"name": name}, lines),) if lines else ()


def _sites(facts: Facts) -> list[Site]:
    return [write.site for write in facts.writes or facts.missed]


def for_argument(facts: Facts, values: Mapping[str, object]) -> tuple[Fix, ...]:
    """Compute a new tensor in the function instead of changing the argument."""
    frame, write = _written_at(facts), facts.first
    lines: Lines = ()
    if frame is not None and write is not None:
        change = source.out_of_place(frame, write.op)
        change = change if change is not None else source.clone_before(frame, write.op)
        lines = source.changed_lines(frame.file, change)
    return (Fix.worded("help.leave_the_argument", values, lines),)


def _written_at(facts: Facts) -> Frame | None:
    return None if facts.first is None else facts.first.site.shown_frame


def for_checkpoint(facts: Facts) -> tuple[Fix, ...]:
    """Bind the value when the function is made, pass it as an argument, or run backward before it changes."""
    conflict = facts.conflict
    path, call, defined = conflict.save.slot, conflict.save.site.shown_frame, _definition(facts)
    if path is None:
        return (_function_fix("depend_on_arguments", facts),)
    if any(write.kind == "step" for write in facts.writes):
        return (_function_fix("reorder_step", facts), _function_fix("recompute_forward", facts, meaning="changed"))
    lines: Lines = ()
    if call is not None and defined is not None:
        is_tensor = bool(conflict.save.tensor.storage)
        value = f"{path}.clone()" if is_tensor and conflict.rebound is None else path
        change = source.bind_early(defined, call, path, value)
        lines = source.changed_lines(defined.file, change)
        for one in (
            () if lines or (is_tensor and conflict.rebound is None) else source.passed_to_method(defined, call, path)
        ):
            lines += source.changed_lines(defined.file, one)
    stacks = [write.site.user_frames for write in facts.writes]
    moved = source.move_behind(stacks, conflict.use.site.user_frames) if stacks else None
    later = moved.lines if moved is not None and moved.is_plain else ()
    found = (_function_fix("bind_early", facts, lines), _function_fix("change_after_backward", facts, later))
    return tuple(sorted(found, key=lambda fix: not fix.lines))


def for_context(facts: Facts) -> tuple[Fix, ...]:
    """Keep a copy of the tensor; or keep it by save_for_backward, which makes PyTorch refuse the write."""
    if not facts.conflict.save.tensor.storage:  # an array of NumPy's own memory
        return (_function_fix("copy_on_context", facts),)
    attribute, defined = facts.conflict.save.slot or "", _definition(facts)
    copied: Lines = ()
    lines: Lines = ()
    if defined is not None:
        kept = source.kept_on_context(defined, attribute.partition(".")[0])
        copied = source.changed_at(kept, lambda frame: source.clone_at_save(frame, f"ctx.{attribute}"))
        if "[" in attribute:
            copied = source.changed_lines(defined.file, source.copy_element_kept(defined, attribute))
        changes = source.save_for_backward(defined, attribute)
        lines = tuple(line for change in changes for line in source.changed_lines(defined.file, change))
    checked = _function_fix("save_for_backward", facts, lines, "changed")
    return (_function_fix("copy_on_context", facts, copied), checked)


def for_unmarked(facts: Facts) -> tuple[Fix, ...]:
    """Mark the input dirty and return it, or leave it as it is and write into a copy."""
    parameter, defined = facts.conflict.save.slot, _definition(facts)
    marked: Lines = ()
    if parameter is not None and defined is not None:
        change = source.mark_dirty(defined, parameter)
        marked = source.changed_lines(defined.file, change)
    copied: Lines = ()
    frames = {frame for write in facts.writes if (frame := write.site.shown_frame) is not None}
    if len(frames) == 1:
        frame = frames.pop()
        copy = source.clone_before(frame, facts.writes[0].op)
        copied = source.changed_lines(frame.file, copy)
    found = (_function_fix("mark_dirty", facts, marked), _function_fix("copy_in_forward", facts, copied))
    return tuple(sorted(found, key=lambda fix: not fix.lines))


def _definition(facts: Facts) -> Frame | None:
    site = facts.conflict.function_site
    return site.frames[-1] if site is not None and site.frames and site.frames[-1].is_user else None


def _function_fix(kind: str, facts: Facts, lines: Lines = (), meaning: Any = "preserved") -> Fix:
    conflict = facts.conflict
    values = {
        "name": facts.name,
        "op": facts.op,
        "function": conflict.bridge.older if conflict.bridge is not None else facts.op,
        "attribute": conflict.save.slot or "?",
    }
    return Fix.worded(f"help.{kind}", values, lines, keeps=meaning == "preserved")


def written_with_graph(name: str, made: Sequence[Site], carrier: Carrier | None) -> tuple[Fix, ...]:
    """The writes that gave a parameter a graph, under ``no_grad``: no other tensor can take its place in the module.

    Where each replaces all of it, it is cut off before: what a network has computed for it may be trained through it.
    """
    stacks = [site.user_frames for site in made]
    stacks += [(carrier.bound_at,)] if carrier is not None and carrier.bound_at is not None else []
    attribute, values = name.rpartition(".")[2], {"name": name}
    cut = next(filter(None, (source.cut_before_written(one, attribute) for one in stacks)), ())
    if cut:
        return (Fix.worded("help.parameter_cut_before", values, cut, keeps=True, kind="detach_parameter"),)
    anew = next(filter(None, (source.second_name_anew(one, attribute) for one in stacks)), ())
    if anew:
        return (Fix.worded("help.out_of_place", values, anew, kind="copy_second_name"),)
    lines = next(filter(None, (source.all_under_no_grad(one, attribute) for one in stacks)), ())
    return (Fix.worded("help.parameter_unrecorded", values, lines, kind="no_grad"),)
