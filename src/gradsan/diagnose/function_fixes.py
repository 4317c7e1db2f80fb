"""Suggestions for checkpointed functions and custom Functions. Nothing here was run."""

from __future__ import annotations

from typing import Any

from gradsan import source
from gradsan.diagnose.facts import Facts
from gradsan.diagnose.levels import place
from gradsan.model import Fix, Frame, Message

Lines = tuple[tuple[str, int, str], ...]


def for_checkpoint(facts: Facts) -> tuple[Fix, ...]:
    """Bind the value when the function is made, hand it in as an argument, or run backward before it changes."""
    conflict = facts.conflict
    path, call, defined = conflict.save.slot, place(conflict.save.site), _definition(facts)
    if path is None:
        return (_fix("depend_on_arguments", facts),)
    if any(write.kind == "step" for write in facts.writes):
        return (_fix("reorder_step", facts), _fix("recompute_forward", facts, meaning="changed"))
    lines: Lines = ()
    if call is not None and defined is not None:
        is_tensor = bool(conflict.save.tensor.storage)
        value = f"{path}.clone()" if is_tensor and conflict.rebound is None else path
        change = source.bind_early(defined, call, path, value)
        lines = () if change is None else source.changed_lines(defined.file, change)
    return (_fix("bind_early", facts, lines), _fix("change_after_backward", facts))


def for_context(facts: Facts) -> tuple[Fix, ...]:
    """Keep the tensor by save_for_backward, which makes PyTorch check it; or do not write into it."""
    attribute, defined = facts.conflict.save.slot or "", _definition(facts)
    lines: Lines = ()
    if defined is not None:
        changes = source.save_for_backward(defined, attribute)
        lines = tuple(line for change in changes for line in source.changed_lines(defined.file, change))
    return (_fix("save_for_backward", facts, lines),)


def for_unmarked(facts: Facts) -> tuple[Fix, ...]:
    """Mark the input dirty and return it, or leave it as it is and write into a copy."""
    parameter, defined = facts.conflict.save.slot, _definition(facts)
    marked: Lines = ()
    if parameter is not None and defined is not None:
        change = source.mark_dirty(defined, parameter)
        marked = () if change is None else source.changed_lines(defined.file, change)
    copied: Lines = ()
    frames = {frame for write in facts.writes if (frame := place(write.site)) is not None}
    if len(frames) == 1:
        frame = frames.pop()
        copy = source.clone_before(frame, facts.writes[0].op)
        copied = () if copy is None else source.changed_lines(frame.file, copy)
    found = (_fix("mark_dirty", facts, marked), _fix("copy_in_forward", facts, copied))
    return tuple(sorted(found, key=lambda fix: not fix.lines))


def _definition(facts: Facts) -> Frame | None:
    site = facts.conflict.function_site
    return site.frames[-1] if site is not None and site.frames and site.frames[-1].is_user else None


def _fix(kind: str, facts: Facts, lines: Lines = (), meaning: Any = "preserved") -> Fix:
    conflict = facts.conflict
    values = {
        "name": facts.name,
        "op": facts.op,
        "function": conflict.bridge.older if conflict.bridge is not None else facts.op,
        "attribute": conflict.save.slot or "?",
    }
    return Fix(
        kind=kind,
        meaning=meaning,
        summary=Message(f"help.{kind}", values),
        how_changed=Message(f"help.{kind}_how", values) if meaning == "changed" else None,
        applicability="review" if lines else "manual",
        lines=lines,
    )
