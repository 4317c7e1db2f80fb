"""A stale use met in backward, turned into plain data while the graph and the user's variables are still there."""

from __future__ import annotations

import bisect
import itertools
import sys
from typing import Any

from gradsan.capture import _torch, graphs, ledger, naming
from gradsan.capture.stacks import symbolise
from gradsan.model import Bridge, Conflict, Region, Save, Site, TensorInfo, Use, Write


def tensor_info(tensor: Any, was_leaf: bool) -> TensorInfo:
    """What ``tensor`` is, without it."""
    _, _, (offset, shape, strides, itemsize) = _torch.weak_identity(tensor)
    return TensorInfo(
        shape=tuple(tensor.shape),
        dtype=str(tensor.dtype).removeprefix("torch."),
        device=str(tensor.device),
        storage=_torch.storage_identity(tensor),
        region=Region(offset, shape, strides if strides is not None else (), itemsize),
        requires_grad=bool(tensor.requires_grad) if was_leaf else True,
        is_leaf=was_leaf,
    )


def slot_of(node: Any, packed: Any) -> str | None:
    """The name of the slot of ``node`` that keeps ``packed``; None where the Node shows no slots."""
    if node is None:
        return None
    for slot, saved in _torch.saved_slots(node):
        if _torch.packed_object(saved) is packed:
            return slot
    return None


def collect(core: Any, steps: Any, save: Any, tensor: Any, packed: Any, *, raised: bool) -> Conflict:
    """All that is known at the moment when backward unpacks ``save`` and finds its tensor changed.

    ``tensor`` is the alias whose counter moved, ``packed`` the object that autograd keeps.
    """
    node = _torch.current_node()
    slot = slot_of(node, packed)
    frame = sys._getframe(1)
    backward = steps.current_backward()
    clock = core.clock
    was_leaf = getattr(save, "was_leaf", False)
    info = tensor_info(tensor, was_leaf)
    saved_version = save.version if hasattr(save, "version") else dict(_versions(save))[id(tensor)]
    writes = ledger.writes_since(core, steps, info.storage, save.clock, saved_version)
    return Conflict(
        save=Save(
            clock=save.clock,
            site=symbolise(save.stack),
            tensor=info,
            version=saved_version,
            node=None if node is None else node.name(),
            slot=slot,
            is_output=bool(slot and slot.startswith("result")),
            sequence=(_torch.node_sequence(node) or 0) if node is not None else 0,
            step=_steps_before(steps, save.clock, core.steps),
        ),
        writes=writes,
        use=Use(
            clock=clock,
            site=symbolise(backward.stack) if backward else symbolise(core.stack()),
            version=tensor._version,
            step=core.steps,
            retain_graph=backward.retain_graph if backward else None,
            via=backward.via if backward else "backward",
        ),
        names=naming.names_of(tensor, frame),
        unexplained=ledger.unexplained_moves(writes, saved_version, tensor._version),
        root_sequence=backward.root_sequence if backward else None,
        bridge=_bridge(core, backward, node, save, writes, frame),
        raised=raised,
        under_user_hooks=not raised,
        log_was_cut=core.writes_were_cut,
    )


def _versions(save: Any) -> list[tuple[int, int]]:
    return [(id(alias), version) for alias, version in save.aliases]


def _steps_before(steps: Any, clock: int, total: int) -> int:
    """How many steps had finished at ``clock``; exact while the record of steps reaches back that far."""
    later = sum(1 for record in steps.steps if record.end is not None and record.end > clock)
    return max(0, total - later)


def _bridge(core: Any, backward: Any, node: Any, save: Any, writes: tuple[Write, ...], frame: Any) -> Bridge | None:
    if backward is None or node is None or not writes or not backward.roots:
        return None
    moment = writes[0].sequence
    if backward.root_sequence is None or backward.root_sequence < moment:
        return None
    cut = graphs.crossing(graphs.path(list(backward.roots), node), moment)
    if cut is None:
        return None
    recent = core.recent_saves()
    return Bridge(
        older=cut.older.name(),
        younger=cut.younger.name(),
        name=naming.name_of_output(cut.older, frame),
        taken_near=_sites_near(recent, _torch.node_sequence(cut.younger)),
        made_near=_sites_near(recent, _torch.node_sequence(cut.older)),
        forward_ran_again=any(number >= moment and stack is save.stack for number, stack in recent),
    )


def _sites_near(recent: list[tuple[int, Any]], number: int | None) -> tuple[Site, ...]:
    """Where the Node with this sequence number was made: exact if it saved something, else the saves around it.

    Nodes that save nothing (an addition, a view) leave no stack of their own.
    """
    if number is None or not recent:
        return ()
    numbers = [entry[0] for entry in recent]
    if any(later < earlier for earlier, later in itertools.pairwise(numbers)):
        recent = sorted(recent, key=lambda entry: entry[0])
        numbers = [entry[0] for entry in recent]
    at = bisect.bisect_left(numbers, number)
    if at < len(numbers) and numbers[at] == number:
        return (symbolise(recent[at][1]),)
    return tuple(symbolise(stack) for _, stack in recent[max(0, at - 1) : at + 1])
