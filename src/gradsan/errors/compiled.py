"""Clues to a version error raised while torch.compile built the backward: the traced graph, run again.

The traced graph is on the traceback, each operation with the line of the program that called it. It is run
again on tensors of the same sizes without data, and inspected in between: which call made the Node whose saved value
is stale, and which calls moved that version. Likewise for compiled functions that write inputs.

Roles: ``saved`` (``op`` the Node; ``values``: ``slot``, ``shape``, ``dtype``, ``device``), ``made`` (the call whose
result the value is, where one of the program's own is), ``written`` (a call that moved the version after the save, or
that wrote an input).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.graph import Node

from gradsan import _torch
from gradsan.errors.context import Context
from gradsan.graph import stale_slots, traced_graphs, walk
from gradsan.model import Clue


def gather_traced(context: Context) -> tuple[Clue, ...]:
    """Return the clues from the second run; empty where this torch leaves no graph on the traceback."""
    graph = _torch.traced_graph(context.error)
    if graph is None:
        return ()
    # Saved-tensor hooks of deep mode would hide the saves.
    with torch.enable_grad(), _torch.hushed(), _torch.without_hooks(), _torch.without_data(graph):
        run = _Run(graph)
        results = run.outputs([_without_data(one.meta.get("example_value")) for one in run.placeholders()])
        if context.row == "compiled_inputs_share":
            return tuple(run.writes_to_inputs())
        found = _first_stale([one.grad_fn for one in results if one.grad_fn is not None])
    return () if found is None else tuple(run.clues(*found))


def _first_stale(roots: list[Node]) -> tuple[Any, str, Any] | None:
    """Return the Node, slot and tensor at which a backward would stop."""
    for node in walk.engine_order(roots):
        for slot, saved in _torch.saved_slots(node):
            tensor = _torch.packed_object(saved)
            if not torch.is_tensor(tensor) or _torch.is_hooked(saved):
                continue
            try:
                _torch.read_slot(node, slot.partition("[")[0])
            except RuntimeError as error:
                if stale_slots.is_version_error(error):
                    return node, slot, tensor
    return None


class _Run(traced_graphs.TracedRun):
    """One run of the traced graph, with the clues drawn from it."""

    def clues(self, node: Node, slot: str, tensor: torch.Tensor) -> list[Clue]:
        """Return the clues about the stale value in a slot of ``node``."""
        storage = _torch.storage_identity(tensor)
        matching = self.call_of(_torch.node_sequence(node))
        if matching is None:
            return []
        position, call = matching
        facts = {"slot": slot, **_torch.facts_of(tensor)}
        found = [Clue("saved", traced_graphs.site_of(call), op=node.name(), values=facts)]
        made = [one for _, _, one in self.nodes_of[: position + 1] if self.is_in(one, storage)]
        if made:
            found.insert(0, Clue("made", traced_graphs.site_of(made[0]), op=made[0].name))
        # The saving call itself may move the version: addmm_ saves, then writes.
        return found + [
            Clue("written", traced_graphs.site_of(one), op=traced_graphs.called(one))
            for at, one, moved in self.moved
            if moved == storage and at > position + 1
        ]

    def writes_to_inputs(self) -> list[Clue]:
        """Return the calls that wrote an argument of the traced function."""
        given = [self.env.get(node) for node in self.placeholders()]
        storages = {_torch.storage_identity(one) for one in given if torch.is_tensor(one)}
        return [
            Clue("written", traced_graphs.site_of(one), op=traced_graphs.called(one))
            for _, one, moved in self.moved
            if moved in storages
        ]


def _without_data(example: Any) -> Any:
    """Return a tensor like ``example``, without data; other values unchanged."""
    if not torch.is_tensor(example):
        return example
    fresh = torch.empty_like(example, requires_grad=False)
    if not example.requires_grad:
        return fresh
    leaf = fresh.requires_grad_()
    return leaf if example.is_leaf else leaf.clone()
