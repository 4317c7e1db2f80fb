"""Suggested fixes, with the concrete changed line where the source allows one. None of them was run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from gradsan import source
from gradsan.diagnose import needs
from gradsan.diagnose.carriers import Carrier, cut
from gradsan.diagnose.facts import Facts
from gradsan.diagnose.names import operand_in_slot, operands_at_save, result_at_save, shared_level
from gradsan.diagnose.value_fixes import recorded_by_name
from gradsan.model import Fix, Frame, Lines, Message, Site, Write

_GIVEN = frozenset({"input", "mat1", "self"})
"""Slots of the value that a layer is called with; its weights have others."""


def instead_of_overwriting(facts: Facts, *, copy_first: bool = False) -> tuple[Fix, ...]:
    """Bind the result to a new tensor, write into a copy, or let autograd save a copy.

    Rebinding the name hides the write from other names of the same tensor and from the caller; where the source
    shows such names, the copy is made where the value is saved, and the other fixes are called a change of meaning.
    Suggestions with a concrete line come first.
    """
    if _is_written_by_alias(facts):
        return (*recompute_forward(facts), *advice(facts, "reorder_step", "changed"))
    after = update_after_backward(facts) if facts.name_kind == "parameter" else ()
    if after:
        return after
    if facts.name_kind == "parameter" and is_put_back(facts):
        return recompute_forward(facts)
    writes = facts.writes or facts.missed
    tensor = facts.conflict.save.tensor
    is_unrecorded = writes and not any(write.grad_enabled or _is_in_function(write.site) for write in writes)
    has_graph = facts.conflict.save.is_output or (tensor.requires_grad and not tensor.is_leaf)
    recorded = recorded_by_name(facts) if has_graph else ()
    if recorded:
        return (*recorded, *_copy_for_autograd(facts))
    if facts.conflict.save.is_output and is_unrecorded:
        # A name bound anew where autograd records nothing would have no graph.
        return (_fix("record_the_change", "changed", facts, ()), *_copy_for_autograd(facts))
    is_bound = facts.name_kind == "parameter" and isinstance(facts.name, str) and "." in facts.name
    # A module's parameter cannot be bound to the result of an operation.
    writes = () if is_bound else writes
    new = _each_line(writes, _new_value, tensor.requires_grad and not tensor.is_leaf)
    copy = _each_line(writes[:1], partial(_copy, facts.conflict.save.site)) if _write_one_name(writes) else _Suggested()
    # Objects that share one tensor: bound anew in one of them, the others keep the old one.
    if len({name.text for name in facts.conflict.names if name.kind != "value"}) > 1:
        new, copy = replace(new, hidden_from_others=True), replace(copy, hidden_from_others=True)
    new_fix, copy_fix = _rebinding("out_of_place", facts, new), _rebinding("clone_before_mutation", facts, copy)
    # A line with a copy reads easier than several parts put into new tensors. A write that nothing reports may stand
    # between it and what the same function has saved.
    is_scattered = sum(text.count("_scatter(") for _, _, text in new.lines) > 1
    copy_first = copy_first or bool(is_scattered and copy.lines and not _is_saved_beside(facts, writes))
    if not new.hidden_from_others and not copy.hidden_from_others:
        pair = (copy_fix, new_fix) if copy_first else (new_fix, copy_fix)
        found = pair if pair[0].lines or pair[1].lines else (*_copy_for_autograd(facts), *pair)
    else:
        is_new = not copy.lines or (new.lines and not copy_first)
        found = (*_copy_for_autograd(facts), new_fix if is_new else copy_fix)
    if facts.writes_within_itself and (new.lines or copy.lines):
        # A copy for autograd would keep the write, whose result is undefined.
        how = Message("help.written_apart_how", {"name": facts.name})
        return tuple(replace(fix, meaning="changed", how_changed=how) for fix in (new_fix, copy_fix) if fix.lines)
    element = _each_line(writes, _new_element)
    if element.lines and element.lines != new.lines:
        of_container = _rebinding("out_of_place", facts, element)
        found = (of_container, *_copy_for_autograd(facts)) if _is_of_container(writes) else (*found, of_container)
    return tuple(sorted(found, key=lambda fix: not fix.lines))


def _is_saved_beside(facts: Facts, writes: Sequence[Write]) -> bool:
    """Whether the function that writes has saved the value itself, as far as names show."""
    saved = facts.conflict.save.site.user_frame
    written = [write.site.user_frame for write in writes]
    return any(
        saved is not None and one is not None and (saved.file, saved.function) == (one.file, one.function)
        for one in written
    )


def is_put_back(facts: Facts) -> bool:
    """Whether weights are changed for this backward alone: to write elsewhere would take the change from it."""
    updates = facts.updates_of_all
    stacks = [write.site.user_frames for write in updates]
    by_hand = bool(updates) and all(write.kind != "step" for write in updates)
    return by_hand and source.is_put_back(stacks, facts.conflict.use.site.user_frames)


def instead_of_writing_buffer(facts: Facts) -> tuple[Fix, ...]:
    """Let autograd save a copy, so that the buffer stays the tensor that others hold; else as for any tensor."""
    others = instead_of_overwriting(facts, copy_first=True)
    copy = _copy_for_autograd(facts) if facts.name_kind == "buffer" and not facts.conflict.save.is_output else ()
    return (*(one for one in copy if one not in others), *others)


def copy_handed_out(facts: Facts) -> tuple[Fix, ...]:
    """Pass NumPy, DLPack or a buffer a copy with memory of its own.

    Memory shared once and used in a loop is meant to be written: there a copy of each use comes first.
    """
    writes = facts.writes or facts.missed
    copies = _each_line(writes, lambda write, frame: source.clone_handed_out(frame, write.op))
    if not copies.lines:
        return ()
    is_each_round = any(_is_shared_each_round(write.site, facts.conflict.save.site) for write in writes)
    if facts.name_kind == "parameter" and not is_each_round:
        return advice(facts, "reorder_update", "preserved")  # Writes that are to reach the parameter.
    at_use = () if is_each_round else _copy_for_autograd(facts)
    return (*at_use, _fix("clone_before_mutation", "preserved", facts, copies.lines, summary="help.copy_handed_out"))


def _is_shared_each_round(shared: Site, saved: Site) -> bool:
    """Whether the value is saved in the round in which its memory was shared, as far as loops show."""
    level = shared_level(shared.user_frames, saved.user_frames)
    if level < 0:
        return False
    places = [source.statement_at(one) for one in saved.user_frames[level + 1 :]]
    is_later = any(one is not None and one.loops for one in places)
    return not is_later and source.in_same_loops(shared.user_frames[level], saved.user_frames[level])


def disable_inplace_module(facts: Facts, writer: str) -> tuple[Fix, ...]:
    """Turn ``inplace=True`` off where it was set; ``writer`` is the class of the layer that wrote."""
    first = facts.writes[0]
    frame = first.site.user_frame
    change = None if frame is None else source.inplace_false(frame)
    if change is not None and frame is not None:
        lines = source.changed_lines(frame.file, change)
    else:
        files = dict.fromkeys(one.file for one in reversed(first.site.user_frames))
        lines = next((found for file in files if (found := _made_in_place(file, writer))), ())
    fix = _fix("disable_inplace_module", "preserved", facts, lines)
    name = None if frame is None else source.first_argument(frame)
    bound = source.bound_names(frame) if frame is not None else ()
    if frame is not None and name is not None and name not in bound and source.reads_later(frame, name):
        # ``act(x)`` alone, and ``x`` further on: whether that was to be the result, the source does not show.
        fix = replace(fix, meaning="changed", how_changed=Message("help.second_name_copied_how", {"name": name}))
    return (fix,)


def instead_of_filling(facts: Facts) -> tuple[Fix, ...]:
    """Collect the parts in a list and stack them, or use the out-of-place counterpart of the filling method."""
    parts = _fix("list_and_stack", "preserved", facts, ())
    others = instead_of_overwriting(facts)
    whole = tuple(fix for fix in others if fix.kind == "out_of_place" and fix.lines)
    rest = tuple(fix for fix in others if fix.kind != "out_of_place")
    # A new tensor for every filled part copies the whole tensor each time.
    by_index = any(write.op == "__setitem__" for write in facts.writes or facts.missed)
    return (parts, *whole, *rest) if by_index else (*whole, parts, *rest)


def advice(
    facts: Facts, kind: str, meaning: Literal["preserved", "changed"], summary: str | None = None
) -> tuple[Fix, ...]:
    """The fix of ``kind`` in words alone."""
    return (_fix(kind, meaning, facts, (), summary=summary),)


def update_after_backward(facts: Facts) -> tuple[Fix, ...]:
    """Move manual writes (an average, a clip, a mask) after the backward that needs the old values.

    Gradients do not change where nothing in between reads the written tensor; otherwise nothing is suggested.
    """
    stacks = [update.site.user_frames for update in facts.updates_of_all]
    used = facts.conflict.use.site.user_frames
    within = source.within_block(stacks, used, facts.conflict.save.site.user_frames)
    if within:
        return (_fix("reorder_step", "preserved", facts, within, summary="help.backward_within_block"),)
    moved = source.move_behind(stacks, used)
    if moved is None or not moved.is_plain:
        return ()
    return (_fix("reorder_step", "preserved", facts, moved.lines, summary="help.update_after_backward"),)


def recompute_forward(facts: Facts) -> tuple[Fix, ...]:
    """Run the forward again after the step."""
    stacks = [write.site.user_frames for write in facts.updates_of_all]
    saved = facts.conflict.save.site.user_frames or None
    again = source.run_again(saved, stacks, facts.conflict.use.site.user_frames) if stacks else []
    lines = again[0] if saved and again else ()
    if is_put_back(facts):
        return (Fix.worded("help.recompute_perturbed", {}, lines, kind="recompute_forward"),)
    return (_fix("recompute_forward", "changed", facts, lines),)


def detach_carried_state(facts: Facts, carrier: Carrier | None, shown: str | Message) -> tuple[Fix, ...]:
    """Detach the state where it is carried over; ``retain_graph=True`` is then not needed."""
    updated = facts.updates[0].site if facts.updates else None
    found = None if carrier is None else cut(facts.conflict.use.site, updated, carrier)
    lines = () if found is None else _as_lines(found[1], found[0])
    return (_fix("detach_carried_state", "changed", facts, lines, values={"bridge": shown}),)


def drop_retain_graph(facts: Facts) -> tuple[Fix, ...]:
    """Remove ``retain_graph=True``, which the detach makes unnecessary."""
    use = facts.conflict.use.site.shown_frame
    if use is None or not facts.conflict.use.retain_graph:
        return ()
    lines = _as_lines(use, source.drop_keyword(use, "retain_graph"))
    return (_fix("drop_retain_graph", "changed", facts, lines),) if lines else ()


def save_copy_in_hooks(facts: Facts, *, in_buffer: bool) -> tuple[Fix, ...]:
    """Let the pack hook keep a copy instead of the tensor itself, or each of its copies in memory of its own."""
    if in_buffer:
        return advice(facts, "pack_in_own_memory", "preserved")
    return (*advice(facts, "pack_a_copy", "preserved"), *instead_of_overwriting(facts))


def _fix(
    kind: str,
    meaning: Any,
    facts: Facts,
    lines: Lines,
    values: dict[str, object] | None = None,
    summary: str | None = None,
) -> Fix:
    filled = {"name": facts.name, "op": facts.op, **(values or {})}
    made = Fix.worded(f"help.{kind}", filled, lines, keeps=meaning == "preserved")
    return made if summary is None else replace(made, summary=Message(summary, filled))


@dataclass(frozen=True, slots=True)
class _Suggested:
    """Changed lines, and whether the source shows readers that would no longer see the written values."""

    lines: Lines = ()
    hidden_from_others: bool = False


def _new_value(write: Write, frame: Frame) -> source.Change | None:
    return source.out_of_place(frame, write.op) or source.part_out_of_place(frame, write.op, _index_is_tensor(write))


def _new_element(write: Write, frame: Frame) -> source.Change | None:
    return source.element_out_of_place(frame, write.op)


def _is_of_container(writes: Sequence[Write]) -> bool:
    """Whether ``x[k] += v`` wrote an element of a list or dict: for a tensor, Python would also store it again."""
    stored = {(frame.file, frame.line) for one in writes if one.op == "__setitem__" and (frame := one.site.user_frame)}
    added = [one.site.user_frame for one in writes if one.op.startswith("__i")]
    return (
        bool(added)
        and len(added) == len(writes)
        and all(frame is not None and (frame.file, frame.line) not in stored for frame in added)
    )


def _copy(saved: Site, write: Write, frame: Frame) -> source.Change | None:
    last = frame.end_line or frame.line
    kept = (one for one in saved.user_frames if source.in_same_function(one, frame))
    return source.clone_before(frame, write.op, value_first=any(frame.line <= one.line <= last for one in kept))


def _index_is_tensor(write: Write) -> bool | None:
    """Whether ``x[index] = v`` was by a tensor; any other operation writes to a view, made without one."""
    if write.op != "__setitem__":
        return False
    return None if write.region is None else write.region.index is None


def _each_line(
    writes: Iterable[Write], suggest: Callable[[Write, Frame], source.Change | None], are_results: bool = False
) -> _Suggested:
    """One change for each writing line; none at all where one line has none, because a partial change fixes nothing."""
    changes: dict[tuple[str, int], source.Change | None] = {}
    for write in writes:
        frame = write.site.user_frame
        if frame is None:
            return _Suggested()
        if changes.get((frame.file, frame.line)) is None:
            changes[frame.file, frame.line] = (
                (source.rebuilt_list(frame, write.op, are_results) if suggest is _new_value else None)
                if source.written_for_others(frame, write.op)
                else _as_seen(write, frame, suggest(write, frame))
            )
    lines: list[tuple[str, int, str]] = []
    for (file, _), change in changes.items():
        if change is None:
            return _Suggested()
        lines += source.changed_lines(file, change)
    return _Suggested(tuple(dict.fromkeys(lines)), any(change.notes for change in changes.values() if change))


def _as_seen(write: Write, frame: Frame, change: source.Change | None) -> source.Change | None:
    """The change, with the rebound value returned where a module's hook must; None where nobody reads that value."""
    between: list[Frame] = []
    for one in write.site.frames:
        if one is frame:
            break
        between = [] if one.is_user else [*between, one]
    if not source.called_as_hook(between):
        # The caller of ``def scale_(x): x *= 2`` reads the tensor that it passed: a name bound anew never reaches it.
        is_lost = change is not None and "parameter_not_returned" in change.notes
        return None if is_lost and source.written_for_caller(frame, write.op) else change
    name = source.written_expression(frame, write.op, write.site.inner_frames)
    if change is None and name is not None:
        change, name = source.argument_out_of_place(frame, write.op), name.partition("[")[0]
    if change is None:
        return None
    return None if name is None else source.returned_by_hook(frame, between, name, change)


def _is_written_by_alias(facts: Facts) -> bool:
    """Whether a parameter was written by the name of other memory that it views, as optimizers with one flat buffer do.

    Rebinding that name would leave the parameter with the old memory, which is not updated any more.
    """
    if facts.name_kind != "parameter" or not facts.writes:
        return False
    for write in facts.writes:
        frame = write.site.user_frame
        name = None if frame is None else source.written_expression(frame, write.op, write.site.inner_frames)
        if name is None or "." not in name or ".data" in name or _is_called(facts, name):
            return False
    return True


def _write_one_name(writes: Sequence[Write]) -> bool:
    """Whether all writes use the same name in the same function, so that one copy covers them all."""
    targets = set()
    for write in writes:
        frame = write.site.user_frame
        if frame is None:
            return False
        name = source.written_expression(frame, write.op, write.site.inner_frames)
        targets.add((frame.file, frame.function, name))
    return len(targets) == 1


def _rebinding(kind: str, facts: Facts, suggested: _Suggested) -> Fix:
    meaning = "changed" if suggested.hidden_from_others else "preserved"
    return _fix(kind, meaning, facts, suggested.lines)


def copy_within_forward(facts: Facts) -> tuple[Fix, ...]:
    """The copy for autograd where the function that saved a parameter writes it again: normalised in a forward."""
    saved = facts.conflict.save.site.user_frame
    writing = [update.site.user_frames for update in facts.updates]
    is_within = saved is not None and all(
        any((one.file, one.function) == (saved.file, saved.function) for one in frames) for frames in writing
    )
    return _copy_for_autograd(facts) if is_within else ()


def _copy_for_autograd(facts: Facts) -> tuple[Fix, ...]:
    """Clone the value where it is saved: autograd's copy is unaffected by later writes."""
    save = facts.conflict.save
    frame = save.site.user_frame
    if frame is None:
        return ()
    saving = f"{needs.op_name(save.node or '')}_"
    if save.is_output and source.computes_with_result(frame, saving):
        # ``b = p[:, 2:].exp_()`` saved what it wrote: a clone of its result comes too late.
        change = source.result_out_of_place(frame, saving)
        lines = _as_lines(frame, change)
        return (_fix("out_of_place", "changed", facts, lines),) if lines else ()
    if save.is_output:
        # The line may bind any of the values that a library computes on the way.
        result = result_at_save(facts.conflict)
        names = [] if result is None else [result]
    else:
        names = operands_at_save(facts.conflict)
    if len(names) > 1 or facts.name_kind in ("parameter", "buffer"):
        # Or a view of it has: ``std`` of ``std = self.stats[1]``.
        viewed = {name: (source.alias_of(frame, name) or "").partition("[")[0] for name in names}
        names = [name for name in names if _is_called(facts, name) or _is_called(facts, viewed[name])]
    if not names and not save.is_output:
        # One of a list of operands (einsum), seen through a view of it, or given to layers that run one after another.
        statement = source.statement_at(frame)
        read = [] if statement is None else source.consumed_names(statement)
        names = [name for name in dict.fromkeys(read) if _is_called(facts, name)]
        # A parameter that is taken by a name made at run time: ``v = getattr(module, name + "_v")``.
        need = needs.need_of(save.node or "", save.slot or "") if not names else None
        names += [one] if need is not None and (one := operand_in_slot(facts.conflict, need)) is not None else []
    change = source.clone_at_save(frame, names[0], is_output=save.is_output) if len(names) == 1 else None
    if change is None and save.slot in _GIVEN and facts.name_kind not in ("parameter", "buffer"):
        # What the program has written, and a layer has saved as its input, is what it was given.
        writes = facts.writes or facts.missed
        given = source.clone_argument(frame, writes[0].site.user_frame, writes[0].op) if writes else None
        names, change = ([], None) if given is None else ([given[0]], given[1])
    if change is None:
        return ()
    return (
        _fix(
            "clone_before_mutation",
            "preserved",
            facts,
            source.changed_lines(frame.file, change),
            values={"name": names[0]},
            summary="help.clone_result" if save.is_output else "help.clone_at_save",
        ),
    )


def _is_in_function(site: Site) -> bool:
    """Whether a custom Function made the write, in its forward: its result gets a graph when it is returned."""
    return any(source.is_in_function_forward(frame) for frame in site.user_frames)


def _is_called(facts: Facts, name: str) -> bool:
    """Whether ``name`` is the tensor's name, or the end of it as its own module spells it: ``self.fc.weight``."""
    if not isinstance(facts.name, str):
        return False
    return facts.name == name or (name.startswith("self.") and facts.name.endswith(name.removeprefix("self")))


def _made_in_place(file: str, layer: str) -> Lines:
    change = source.inplace_layer_false(file, layer)
    return source.changed_lines(file, change)


def _as_lines(frame: Frame, change: source.Change | None) -> Lines:
    return source.changed_lines(frame.file, change)
