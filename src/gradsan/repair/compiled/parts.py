"""Parts of a traced graph: neighbouring calls as a graph of their own, with input values computed by eager code."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import fx

from gradsan import _torch
from gradsan.graph.traced_graphs import called
from gradsan.repair.compiled.values import Call

_ENTERS, _LEAVES, _SETS = "_enter_autocast", "_exit_autocast", "_set_grad_enabled"


@dataclass(frozen=True, slots=True)
class Part:
    """A part as a module: ``module`` takes the values of the whole graph's nodes ``inputs``, which ``call`` holds."""

    module: Any
    inputs: tuple[fx.Node, ...]
    call: Call


class Parts:
    """The parts of ``module`` as it runs with the arguments of ``call``."""

    def __init__(self, module: Any, call: Call) -> None:
        """Collect ``calls``, the operations in order."""
        self.module, self.call = module, call
        self.calls: list[fx.Node] = [node for node in module.graph.nodes if node.op.startswith("call_")]

    def placeholders(self) -> list[fx.Node]:
        """The placeholder nodes of the arguments."""
        return [node for node in self.module.graph.nodes if node.op == "placeholder"]

    def border(self, start: int, end: int) -> int:
        """A position between the two, near their middle; at a module boundary if there is one."""
        middle, reach = (start + end) // 2, (end - start) // 4
        paths = {at: layer_of(self.calls[at])[0].split(".") for at in range(max(start, middle - reach - 1), end)}

        def shared(at: int) -> tuple[int, int]:
            before, after = paths[at - 1], paths[at]
            same = next((n for n, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), None)
            # Where no module ends, the deepest boundary available.
            depth = 1_000 if same is None and len(before) == len(after) else same or min(len(before), len(after))
            return depth, abs(at - middle)

        positions = [
            at for at in range(max(start + 1, middle - reach), min(end, middle + reach + 1)) if at - 1 in paths
        ]
        return min(positions, key=shared, default=max(start + 1, middle))

    def part(self, start: int, end: int) -> Part:
        """The calls from ``start`` up to ``end``.

        Raises any exception of the calls before it when they are run.
        """
        inner = self.calls[start:end]
        inside, order = set(inner), {node: at for at, node in enumerate(self.module.graph.nodes)}
        needed = {one: None for node in inner for one in node.all_input_nodes if one not in inside}
        opened = _opened(self.calls[:start])
        inputs = tuple(sorted((one for one in needed if one not in opened), key=order.__getitem__))
        env = self._values(inner[0], inputs)
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        for one in inputs:
            copies[one] = graph.placeholder(re.sub(r"\W", "_", one.name))
        for one in opened:
            copies[one] = graph.node_copy(one, copies.__getitem__)
        for node in inner:
            copies[node] = graph.node_copy(node, copies.__getitem__)
        for one in reversed(_opened(self.calls[:end])):
            if called(one) == _ENTERS:
                graph.call_function(_exit_of(self.calls), (copies[one],))
            else:
                graph.call_function(cast(Callable[..., Any], one.target), (True,))
        results = [node for node in inner if node.op != "placeholder" and self._is_result(node, inside)]
        graph.output(tuple(copies[node] for node in results))
        module = fx.GraphModule(self.module, graph)
        call = self._with(env, inputs)
        return Part(module, inputs, call)

    def _is_result(self, node: fx.Node, inside: set[fx.Node]) -> bool:
        is_used = any(user not in inside for user in node.users) or not node.users
        return is_used and called(node) not in (_ENTERS, _LEAVES, _SETS) and self._gives_tensor(node)

    def _gives_tensor(self, node: fx.Node) -> bool:
        return torch.is_tensor(self._known[node]) if node in self._known else False

    def _values(self, first: fx.Node, wanted: tuple[fx.Node, ...]) -> dict[fx.Node, Any]:
        """Copies of the values of ``wanted`` right before ``first`` is run."""
        given, _ = self.call.fresh()
        run = fx.Interpreter(self.module, garbage_collect_values=False)
        run.args_iter = iter(given)
        self._known: dict[fx.Node, Any] = {}
        found: dict[fx.Node, Any] = {}
        with self.call.around():
            for node in self.module.graph.nodes:
                if node is first:
                    found = {one: run.env[one] for one in wanted}
                    kept = Call.of(tuple(found.values()))
                    if kept is None:
                        raise ValueError("values that cannot be copied")
                    self._kept = kept
                if node.op == "output":
                    break
                run.env[node] = self._known[node] = run.run_node(node)
        return found

    def _with(self, env: dict[fx.Node, Any], inputs: tuple[fx.Node, ...]) -> Call:
        kept = self._kept
        assert len(kept.arguments) == len(inputs) == len(env)
        # Results of operations are arguments here, so the gradients of all that require one are compared.
        return Call(
            kept.arguments,
            kept.needs_grad,
            tuple(True for _ in _torch.tensors_in(list(kept.arguments))),
            self.call.grad_enabled,
            self.call.autocast,
            kept.bytes,
        )


def layer_of(node: fx.Node) -> tuple[str, str]:
    """Path and class of the module in which an operation was traced; both empty where there is none."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    if not stack:
        return "", ""
    path, kind = stack[-1]
    name = kind.rpartition(".")[2] if isinstance(kind, str) else getattr(kind, "__name__", str(kind))
    path = re.sub(r"\[['\"]?(\w+)['\"]?\]", r".\1", re.sub(r"^[LG]\[['\"](\w+)['\"]\]", r"\1", str(path)))
    path = re.sub(r"\.(_modules|_orig_mod)(?=\.|$)", "", path)
    # ``fn`` is torch's name for a module that is compiled as a whole.
    return re.sub(r"^(self|fn)(\.|$)", "", path), name


def _opened(calls: list[fx.Node]) -> list[fx.Node]:
    """The calls among ``calls`` that enter a mode without leaving it."""
    found: list[fx.Node] = []
    for node in calls:
        if called(node) == _ENTERS:
            found.append(node)
        elif called(node) == _LEAVES:
            found = [one for one in found if one is not node.args[0]]
        elif called(node) == _SETS:
            found = [one for one in found if called(one) != _SETS]
            if not node.args[0]:
                found.append(node)
    return found


def _exit_of(calls: list[fx.Node]) -> Any:
    return next(node.target for node in calls if called(node) == _LEAVES)
