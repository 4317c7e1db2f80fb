"""Run of a graph that torch.compile has traced, on tensors without data: which call made which Nodes, what it wrote.

Each call knows the line of the program that made it. The Nodes are those of the program without the compiler.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from gradsan import _torch
from gradsan.model import Site
from gradsan.record.stacks import definition_site, of_formatted


class TracedRun(fx.Interpreter):
    """One run, with the Nodes that each call made and the versions that it moved.

    ``nodes_of`` are (number of the first Node, one past the last, call); ``moved`` (calls before it, call, storage).
    """

    def __init__(self, graph: Any) -> None:
        """``graph`` is an fx.GraphModule."""
        super().__init__(graph, garbage_collect_values=False)
        self.nodes_of: list[tuple[int, int, fx.Node]] = []
        self.moved: list[tuple[int, fx.Node, int]] = []
        self._versions: dict[int, tuple[Any, int]] = {}

    def placeholders(self) -> list[fx.Node]:
        """What stands for the arguments."""
        return [node for node in self.graph.nodes if node.op == "placeholder"]

    def outputs(self, inputs: Iterable[Any]) -> list[Any]:
        """The tensors that the traced function returns."""
        return list(_torch.tensors_in(self.run(*inputs)))

    def run_node(self, n: fx.Node) -> Any:
        """Run one call, and note what it made."""
        first = _torch.sequence_number()
        result = super().run_node(n)
        if n.op.startswith("call"):
            self.nodes_of.append((first, _torch.sequence_number(), n))
        self._look_for_moves(n)
        for tensor in _torch.tensors_in(result):
            self._versions.setdefault(id(tensor), (tensor, tensor._version))
        return result

    def call_method(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Call it; of a number that came as a tensor (a float that varies) any will do."""
        if target == "item" and torch.is_tensor(args[0]) and args[0].is_floating_point() and not args[0].shape:
            return 1.0
        return super().call_method(target, args, kwargs)

    def _look_for_moves(self, n: fx.Node) -> None:
        moved = set()
        for key, (tensor, before) in self._versions.items():
            if tensor._version != before:
                self._versions[key] = (tensor, tensor._version)
                moved.add(_torch.storage_identity(tensor))
        self.moved += [(len(self.nodes_of), n, storage) for storage in moved]

    def call_of(self, number: int | None) -> tuple[int, fx.Node] | None:
        """The call that made the Node with this number, and how many calls came before it."""
        if number is None:
            return None
        told = ((at, one) for at, (first, end, one) in enumerate(self.nodes_of) if first <= number < end)
        return next(told, None)

    def is_in(self, node: fx.Node, storage: int) -> bool:
        """Whether the result of a call lies in this memory."""
        value = self.env.get(node)
        return torch.is_tensor(value) and _torch.storage_identity(value) == storage


def site_of(node: fx.Node) -> Site:
    """Where a call stands in the program; below it the modules of torch's own that were called there."""
    site = of_formatted(str(node.meta.get("stack_trace") or ""))
    if not site.frames or not site.frames[-1].is_user:
        return site
    below: list[Any] = []
    for _, kind in reversed(list((node.meta.get("nn_module_stack") or {}).values())):
        if not isinstance(kind, type) or not kind.__module__.startswith("torch.nn."):
            break
        code = getattr(getattr(kind, "forward", None), "__code__", None)
        below += [] if code is None else definition_site(code).frames
    return Site((*site.frames, *reversed(below)))


def called(node: fx.Node) -> str:
    """What was called, as the log of writes says it: ``mul_``, ``__iadd__``."""
    if isinstance(node.target, str):
        return node.target
    name = getattr(node.target, "__name__", str(node.target))
    return f"__{name}__" if hasattr(operator, f"__{name}__") and node.target in vars(operator).values() else name
