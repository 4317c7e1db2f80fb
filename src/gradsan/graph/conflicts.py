"""Conflict of a stale use, and the Nodes on the path to it, as plain data, made while graph and variables live."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from types import FrameType
from typing import Any

import torch
from torch.autograd.graph import Node

from gradsan import _torch
from gradsan.graph import naming, stale_slots, walk
from gradsan.model import Bridge, Conflict, Frame, Passed, Region, Save, Site, TensorInfo, Use, Write
from gradsan.overlap import overlap
from gradsan.record import ledger
from gradsan.record.backwards import BackwardLog
from gradsan.record.log import Log, Stack, backward_calls, calls_near
from gradsan.record.stacks import symbolise
from gradsan.record.steps import BackwardRecord, StepLog, optimizers_of

_MOST_LOOKED_AT, _MOST_OTHERS = 64, 8
_MOST_READ = 1_000
"""Stale saved tensors that are read to find every optimizer whose step wrote: a network alone may have hundreds."""


def of_failure(
    core: Log,
    steps: StepLog,
    backward: BackwardRecord,
    error: BaseException,
    frame: FrameType | None = None,
    backwards: BackwardLog | None = None,
) -> Conflict | None:
    """Return the conflict behind PyTorch's version error; None where neither graph nor log has its tensor.

    Variables are searched from ``frame``, by default that of the caller. ``backwards`` is the log of
    earlier backward calls, where there is one.
    """
    frame = sys._getframe(1) if frame is None else frame
    inputs = _torch.engine_inputs(error, backward.outputs)
    accumulates = backward.via == "backward"
    stale = stale_slots.find_stale(backward.roots, error, inputs, accumulates, backward.retain_graph)
    if stale is None:
        return None
    found = _of_stale(core, steps, backward, stale, frame)
    if found is None:
        return None
    # PyTorch stops at the first value whose counter moved. Where this one is unchanged, another may not be.
    others: dict[tuple[int | None, int, bool, str], stale_slots.Stale] = {}
    further = stale_slots.further_stale(backward.roots, inputs, accumulates)
    optimizers = optimizers_of(steps, found.save.clock)
    seen = {optimizers.get(found.save.tensor.storage)}
    needing = [stale.node]
    for number, one in enumerate(itertools.islice(further, _MOST_READ)):
        needing.append(one.node)
        storage = None if one.tensor is None else _torch.storage_or_none(one.tensor)
        if number < _MOST_LOOKED_AT and storage == found.save.tensor.storage and _is_beside(found):
            same = _of_stale(core, steps, backward, one, frame)
            found = found if same is None or _is_beside(same) else same
        optimizer = None if storage is None else optimizers.get(storage)
        if len(others) < _MOST_OTHERS or (optimizer not in seen and len(seen) <= _MOST_OTHERS):
            seen.add(optimizer)
            others.setdefault(
                (storage, one.saved_version, one.is_output, "" if one.node is None else one.node.name()), one
            )
    if not _is_beside(found):
        known = needing if len(needing) <= _MOST_READ else []
        found = _with_borrowed(found, core, steps, backward, backwards, frame, inputs, known)
    beside = (_of_stale(core, steps, backward, one, frame) for one in others.values())
    return replace(found, further=tuple(one for one in beside if one is not None))


def _with_borrowed(
    conflict: Conflict,
    core: Log,
    steps: StepLog,
    backward: BackwardRecord,
    backwards: BackwardLog | None,
    frame: FrameType,
    inputs: tuple[Any, ...],
    needing: Sequence[Node | None],
) -> Conflict:
    """Return the conflict with the tensors its loss borrows, if a step or a manual update has overwritten the value."""
    if backwards is None or not any(write.kind == "step" or write.is_parameter for write in conflict.writes):
        return conflict
    since = conflict.save.clock
    from gradsan.graph import borrowed

    found = borrowed.by_later_loss(core, steps, backwards, backward, since, frame, inputs)
    kept = borrowed.retained_for(steps, backwards, backward, since) if found else None
    is_for_others = not found and borrowed.is_for_others(steps, backward, since, needing, inputs)
    return replace(conflict, borrowed=found, retained_at=kept, for_others=is_for_others)


def _is_beside(conflict: Conflict) -> bool:
    """Whether every move of the counter is a logged write to other bytes than the saved ones."""
    if conflict.unexplained or conflict.log_was_cut or not conflict.writes:
        return False
    region = conflict.save.tensor.region
    return all(
        write.kind == "metadata" or (write.region is not None and not overlap(region, write.region))
        for write in conflict.writes
    )


def _of_stale(
    core: Log, steps: StepLog, backward: BackwardRecord, stale: stale_slots.Stale, frame: FrameType
) -> Conflict | None:
    node, tensor = stale.node, stale.tensor
    if tensor is None:
        tensor = stale_slots.tensor_of(core, stale, frame)
        if tensor is None and not stale.hidden and stale_slots.last_write(core, stale) is None:
            return None
    if tensor is not None:
        info = tensor_info(tensor, was_leaf=tensor.is_leaf and not stale.is_output)
        if info.is_leaf and node is not None and not _leads_to(node, info.storage):
            # It requires grad now, but did not when it was saved.
            info = replace(info, requires_grad=False)
    else:
        info = stale_slots.described(core, stale)
    own = stale_slots.saving_write(core, stale)
    own = own if own is not None and own.raw.storage == info.storage else None
    made = None if node is None else stale_slots.of_node(core, steps, node, backward.thread, stale, info.storage)
    if own is not None:
        made = stale_slots.Origin(own.raw.clock, own.raw.stack, backward.thread, True)
    since = made.clock if made else ledger.first_move(core, steps, info.storage, stale.saved_version, stale.version) - 1
    writes = ledger.writes_since(core, steps, info.storage, since, stale.saved_version, stale.version)
    stack = made.stack if made and made.is_exact else None
    save = save_of(core, steps, since, stack, info, stale.saved_version, node, stale.slot)
    if own is not None:
        save = replace(save, node=own.node, slot=own.slot)
    conflict = Conflict(
        save=replace(save, is_output=stale.is_output or own is not None),
        writes=writes,
        use=use_of(core, backward, stale.version),
        names=() if tensor is None else naming.names_of(tensor, frame),
        unexplained=ledger.unexplained_moves(writes, stale.saved_version, stale.version),
        root_sequence=backward.root_sequence,
        bridge=bridge_over(core, backward, node, made, writes, frame),
        raised=True,
        log_was_cut=core.lost_writes_after(since),
        passed=passed(core, backward.roots, node, moment_of(writes)),
        collected_in=naming.collected_in(info.storage, frame) if writes else None,
    )
    from gradsan.graph import compiled

    return compiled.as_uncompiled(conflict, node, stale.slot, tensor, backward)


def _leads_to(node: Node, storage: int) -> bool:
    """Whether ``node`` computes a gradient for a leaf with this memory."""
    leaves = (getattr(child, "variable", None) for child, _ in node.next_functions)
    return any(leaf is not None and _torch.storage_or_none(leaf) == storage for leaf in leaves)


def under_hooks(core: Log, steps: StepLog, save: Any, alias: torch.Tensor) -> Conflict:
    """Return the conflict that the program's own hooks hide: their saved tensor has changed, unchecked by PyTorch."""
    frame = sys._getframe(1)
    node = _torch.current_node()
    slot = _torch.slot_of(node, save.in_slot)
    backward = steps.current_backward()
    saved_version = next(version for kept, version in save.aliases if kept is alias)
    info = tensor_info(alias, was_leaf=alias.is_leaf and alias.requires_grad)
    writes = ledger.writes_since(core, steps, info.storage, save.clock, saved_version, alias._version)
    return Conflict(
        save=save_of(core, steps, save.clock, save.stack, info, saved_version, node, slot),
        writes=writes,
        use=use_of(core, backward, alias._version),
        names=naming.names_of(alias, frame),
        unexplained=ledger.unexplained_moves(writes, saved_version, alias._version),
        root_sequence=backward.root_sequence if backward else None,
        raised=False,
        under_user_hooks=True,
        log_was_cut=core.lost_writes_after(save.clock),
    )


def tensor_info(tensor: torch.Tensor, was_leaf: bool) -> TensorInfo:
    """Return the metadata of ``tensor``."""
    _, _, (offset, shape, strides, itemsize) = _torch.weak_identity(tensor)
    return TensorInfo(
        shape=_torch.shape_of(tensor),
        dtype=str(tensor.dtype).removeprefix("torch."),
        device=str(tensor.device),
        storage=_torch.storage_identity(tensor),
        region=Region(offset, shape, strides if strides is not None else (), itemsize),
        requires_grad=bool(tensor.requires_grad) if was_leaf else True,
        is_leaf=was_leaf,
    )


def save_of(
    core: Log,
    steps: StepLog,
    clock: int,
    stack: Stack,
    tensor: TensorInfo,
    version: int,
    node: Node | None,
    slot: str | None,
) -> Save:
    """Return the save in ``slot`` of ``node`` by the call at ``clock`` and ``stack``; the last three may be None."""
    return Save(
        clock=clock,
        site=Site() if stack is None else symbolise(stack),
        tensor=tensor,
        version=version,
        node=None if node is None else node.name(),
        slot=slot,
        is_output=bool(slot and slot.startswith("result")),
        sequence=0 if node is None else _torch.node_sequence(node) or 0,
        step=steps_before(steps, clock, core.steps),
    )


def use_of(core: Log, backward: BackwardRecord | None, version: int) -> Use:
    """Return the use that happens now, in ``backward``."""
    return Use(
        clock=core.clock,
        site=symbolise(backward.stack if backward else core.stack()),
        version=version,
        step=core.steps,
        retain_graph=backward.retain_graph if backward else None,
        via=backward.via if backward else "backward",
    )


def steps_before(steps: StepLog, clock: int, total: int) -> int:
    """Return how many steps had ended at ``clock``; exact as long as the log of steps reaches back that far."""
    later = sum(1 for record in steps.steps if record.end is not None and record.end > clock)
    return max(0, total - later)


def moment_of(writes: tuple[Write, ...]) -> int:
    """Return the sequence number that separates Nodes made after the first of ``writes`` from older ones."""
    return writes[0].sequence if writes else sys.maxsize


def bridge_over(
    core: Log, backward: BackwardRecord, node: Node | None, made: Any, writes: tuple[Write, ...], frame: FrameType
) -> Bridge | None:
    """Return the edge at which the graph of ``backward`` crosses the first of ``writes`` on its path to ``node``."""
    if node is None or not writes or not backward.roots:
        return None
    moment = writes[0].sequence
    if backward.root_sequence is None or backward.root_sequence < moment:
        return None
    cut = walk.crossing(walk.path(list(backward.roots), node), moment)
    if cut is None:
        return None
    from gradsan.graph import borrowed

    order = walk.engine_order(backward.roots)
    return Bridge(
        older=cut.older.name(),
        younger=cut.younger.name(),
        name=naming.name_of_output(cut.older, frame),
        parameter=naming.parameter_over(cut.older, frame),
        taken_near=borrowed.sites_near(core, cut.younger, backward.thread),
        made_near=borrowed.sites_near(core, cut.older, backward.thread),
        forward_ran_again=made is not None and made.is_exact and core.ran_since(made.stack, moment, made.thread),
        held=naming.held_graphs([node], frame, moment, order),
        numbers=naming.numbers_in(frame),
        is_term=not walk.meets_parameters(order, cut.older),
        backward_ran_between=made is not None
        and any(
            one.stack is backward.stack and made.clock < one.clock < writes[0].clock for one in backward_calls(core)
        ),
    )


def passed(core: Log, roots: Iterable[Node], node: Node | None, moment: int) -> tuple[Passed, ...]:
    """Return the Nodes of a shortest path from one of ``roots`` to ``node``, that one last; empty where there is none.

    ``moment`` is the sequence number that separates the Nodes made after the first write from older ones. Empty, too,
    where the search would take more than ``walk.NODES_WALKED`` Nodes.
    """
    path = [] if node is None else walk.path(list(roots), node, most=walk.NODES_WALKED)
    threads = stale_slots.threads_of(core) if path else ()
    frames: dict[int, Frame | None] = {}
    found: list[Passed] = []
    for one, _ in path:
        number = _torch.node_sequence(one)
        found.append(
            Passed(
                one.name(),
                None if number is None else _line_of(core, number, threads, frames),
                number is not None and number >= moment,
            )
        )
    return tuple(found)


def _line_of(core: Log, number: int, threads: Iterable[int], frames: dict[int, Frame | None]) -> Frame | None:
    """Return the user's line whose call made the Node of that number; None where calls of two threads may have."""
    stacks = [
        one.stack for thread in threads for one in calls_near(core, number, thread) if one.first <= number < one.end
    ]
    if len(stacks) != 1:
        return None
    stack = stacks[0]
    if id(stack) not in frames:
        frames[id(stack)] = symbolise(stack).user_frame
    return frames[id(stack)]
