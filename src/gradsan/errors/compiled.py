"""Clues to a version error that torch.compile met while it built the backward: the traced graph, run once more.

What the compiler had traced is on the traceback, each operation with the line of the program that called it. It is run
again on tensors of the same sizes without data, and looked at in between: which call made the Node whose saved value
is out of date, and which calls moved that version. Likewise for compiled functions that write inputs.

Roles: ``saved`` (``op`` the Node; ``values``: ``slot``, ``shape``, ``dtype``, ``device``), ``made`` (the call whose
result the value is, where one of the program's own is), ``written`` (a call that moved the version after the save, or
that wrote an input).
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from gradsan import _torch
from gradsan.graph import stale_slots, walk
from gradsan.model import Clue, Site
from gradsan.record.stacks import of_formatted

if TYPE_CHECKING:
    from gradsan.errors.failures import Context

TRACED_ROWS = ("compiled_version_error", "compiled_inputs_share")


def gather_traced(context: Context) -> tuple[Clue, ...]:
    """What the second run shows; nothing where this torch leaves no graph on the traceback."""
    graph = _torch.traced_graph(context.error)
    if graph is None:
        return ()
    with torch.enable_grad(), _torch.hushed(), _torch.without_data(graph):
        run = _Run(graph)
        results = run.outputs()
        if context.row == "compiled_inputs_share":
            return tuple(run.writes_to_inputs())
        found = _first_stale([one.grad_fn for one in results if one.grad_fn is not None])
    return () if found is None else tuple(run.clues(*found))


def _first_stale(roots: list[Any]) -> tuple[Any, str, Any] | None:
    """The Node, slot and tensor at which a backward would stop."""
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


class _Run(fx.Interpreter):
    """One run of the traced graph, with the Nodes that each call made and the versions that it moved."""

    def __init__(self, graph: Any) -> None:
        super().__init__(graph, garbage_collect_values=False)
        self._nodes_of: list[tuple[int, int, Any]] = []
        self._moved: list[tuple[int, Any, int]] = []
        self._versions: dict[int, tuple[Any, int]] = {}

    def outputs(self) -> list[Any]:
        """The tensors that the traced function returns."""
        inputs = [_without_data(node.meta.get("example_value")) for node in self.graph.find_nodes(op="placeholder")]
        return list(_tensors(self.run(*inputs)))

    def run_node(self, n: fx.Node) -> Any:
        first = _torch.sequence_number()
        result = super().run_node(n)
        if n.op.startswith("call"):
            self._nodes_of.append((first, _torch.sequence_number(), n))
        self._look_for_moves(n)
        for tensor in _tensors(result):
            self._versions.setdefault(id(tensor), (tensor, tensor._version))
        return result

    def _look_for_moves(self, n: fx.Node) -> None:
        moved = set()
        for key, (tensor, before) in self._versions.items():
            if tensor._version != before:
                self._versions[key] = (tensor, tensor._version)
                moved.add(_torch.storage_identity(tensor))
        self._moved += [(len(self._nodes_of), n, storage) for storage in moved]

    def clues(self, node: Any, slot: str, tensor: Any) -> list[Clue]:
        """What there is to say of the out-of-date value in a slot of ``node``."""
        number = _torch.node_sequence(node)
        storage = _torch.storage_identity(tensor)
        told = [(at, one) for at, (first, end, one) in enumerate(self._nodes_of) if first <= (number or 0) < end]
        if number is None or not told:
            return []
        position, call = told[0]
        facts = {
            "slot": slot,
            "shape": tuple(int(size) for size in tensor.shape),
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "device": str(tensor.device),
        }
        found = [Clue("saved", _site(call), op=node.name(), values=facts)]
        made = [one for _, _, one in self._nodes_of[: position + 1] if self._is_of(one, storage)]
        if made:
            found.insert(0, Clue("made", _site(made[0]), op=made[0].name))
        # The saving call itself may move the version: addmm_ saves, then writes.
        return found + [
            Clue("written", _site(one), op=_called(one))
            for at, one, moved in self._moved
            if moved == storage and at > position + 1
        ]

    def writes_to_inputs(self) -> list[Clue]:
        """The calls that wrote an argument of the traced function."""
        given = [self.env.get(node) for node in self.graph.find_nodes(op="placeholder")]
        storages = {_torch.storage_identity(one) for one in given if torch.is_tensor(one)}
        return [Clue("written", _site(one), op=_called(one)) for _, one, moved in self._moved if moved in storages]

    def _is_of(self, node: fx.Node, storage: int) -> bool:
        value = self.env.get(node)
        return torch.is_tensor(value) and _torch.storage_identity(value) == storage


def _without_data(example: Any) -> Any:
    """A tensor like ``example``, on the same kind of tensors without data; what is no tensor as it is."""
    if not torch.is_tensor(example):
        return example
    fresh = torch.empty_like(example, requires_grad=False)
    if not example.requires_grad:
        return fresh
    leaf = fresh.requires_grad_()
    return leaf if example.is_leaf else leaf.clone()


def _site(node: fx.Node) -> Site:
    return of_formatted(str(node.meta.get("stack_trace") or ""))


def _called(node: fx.Node) -> str:
    if isinstance(node.target, str):
        return node.target
    name = getattr(node.target, "__name__", str(node.target))
    return f"__{name}__" if hasattr(operator, f"__{name}__") and node.target in vars(operator).values() else name


def _tensors(value: Any) -> Iterator[Any]:
    if torch.is_tensor(value):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors(one)
