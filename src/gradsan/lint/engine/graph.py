"""Graph in the abstract interpreter: backward calls, steps and results, and saved values overwritten or freed."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from gradsan.lint.engine.base import LoopEntry
from gradsan.lint.engine.state import RetainedGraphs, State
from gradsan.lint.engine.tensors import Tensors
from gradsan.lint.engine.values import (
    MAYBE,
    NO,
    NODES_WALKED,
    OPEN_SIDE,
    YES,
    Bag,
    Dictionary,
    Layer,
    Memory,
    Node,
    Object,
    Optimizer,
    Parameters,
    Plain,
    Saved,
    Sequence,
    Site,
    Tensor,
    Value,
    Write,
    is_data,
    prove,
)

# The state's key for the parameters whose gradients a backward has filled.
_FILLED = (None, "@filled")


@dataclass(slots=True)
class _Fault:
    """A fault found by a walk: a Node whose saved value was written, or that was freed."""

    node: Node
    saved: Saved | None
    write: Write | None
    freed: Site | None
    level: int


class Graph(Tensors):
    """Interpreter of backward calls and optimizers."""

    def __init__(self, module: ast.Module) -> None:
        super().__init__(module)
        self._loops: list[LoopEntry] = []
        self.backwards: list[tuple[Site, Node | None, bool, int]] = []
        self.retained = RetainedGraphs()

    # -- backward

    def backward(
        self,
        loss: Value,
        retain: bool | None,
        site: Site,
        state: State,
        *,
        is_grad: bool = False,
        inputs: Value | None = None,
    ) -> None:
        """Run backward over the graph of ``loss``; ``retain`` is None where it is unknown.

        Several outputs are one backward, which frees their common Nodes once; with ``inputs`` only the Nodes that lead
        to them.
        """
        spent: list[Node] = []
        for tensor in self.tensors_in(loss, state):
            graph, grad = self.graph_of(tensor, state)
            if grad == NO and tensor.is_certain and not is_grad:
                # Arguments, and lists that callers filled, may contain more than was analysed.
                level = YES if isinstance(loss, Tensor) and len(self.frames) < 3 else MAYBE
                if tensor.is_certain and not tensor.owners:
                    self.report(
                        "GS405",
                        "loss_without_graph",
                        site,
                        state,
                        level,
                        {"name": tensor.text or "?"},
                        [("used", site)],
                    )
                continue
            self._loss_made_leaf(tensor, site, state)
            for term in tensor.terms:
                if not is_grad:
                    self.report(
                        "GS701", "gradient_is_constant", term, state, YES, {"line": _line(site)},
                        [("created", term), ("used", site)], fix="create_graph",
                    )  # fmt: skip
            if graph is None:
                continue
            # A backward that starts here proves that it can.
            if not is_grad:
                tensor.is_certain, tensor.grad = True, YES
                prove(graph)
            self._tell(list(self._faults(graph, state)), site, state, graph, tensor)
            if self.retained.any():
                self.retained.walked(_walk(graph))
            if not is_grad:
                self._fill_gradients(graph, state)
            if retain is False:
                spent += [one for one in self._run_by(graph, inputs, state) if one.saved or one.is_opaque]
            self._note_terms(graph)
        for one in spent:
            state.freed.setdefault(one, site)

    def _run_by(self, graph: Node, inputs: Value | None, state: State) -> list[Node]:
        """The Nodes that a backward runs: with ``inputs``, those that lead to one of them."""
        order = _walk(graph)
        wanted = [] if inputs is None or isinstance(inputs, Parameters) else self.tensors_in(inputs, state)
        if not wanted:
            return order
        ends: set[Node | Tensor] = {self.graph_of(one, state)[0] or one for one in wanted}
        leading: set[Node | Tensor] = set(ends)
        for node in sorted(order, key=lambda one: one.clock):
            if any(parent in leading for parent in node.parents):
                leading.add(node)
        return [one for one in order if one in leading and one not in ends]

    def _fill_gradients(self, graph: Node, state: State) -> None:
        """Give gradients to the parameters that a backward reaches."""
        leaves = {one for node in _walk(graph) for one in node.parents if isinstance(one, Tensor)}
        held = state.heap.get(_FILLED, frozenset())
        assert isinstance(held, frozenset)
        state.heap[_FILLED] = held.union(self.weights_of(tuple(leaves), state))

    def clear_gradients(self, owners: tuple[Value, ...], state: State) -> None:
        """Interpret ``zero_grad()``: the parameters of ``owners`` have no gradients, and no step changes them."""
        held = state.heap.get(_FILLED)
        if isinstance(held, frozenset):
            state.heap[_FILLED] = held.difference(self.weights_of(owners, state))

    def keep_graph(self, loss: Value, site: Site, state: State) -> None:
        """Note that a backward of ``loss`` keeps the graph."""
        for tensor in self.tensors_in(loss, state):
            graph, _ = self.graph_of(tensor, state)
            if graph is not None and not state.quiet:
                nodes = _walk(graph)
                # A module that is not analysed may keep its state.
                is_sure = len(nodes) < NODES_WALKED and not any(
                    one.is_opaque or one.op == "either" or not self.given.isdisjoint(one.parents) for one in nodes
                )
                self.retained.keep(site, tensor.text or "?", nodes, is_sure=is_sure)

    def hand_on(self, values: Iterable[Value], state: State) -> None:
        """Pass ``values`` to code that is not analysed: it may call backward on them."""
        for value in values if self.retained.any() else ():
            for tensor in self.tensors_in(value, state):
                graph, _ = self.graph_of(tensor, state)
                if graph is not None:
                    self.retained.handed_on(_walk(graph))

    def _note_terms(self, graph: Node) -> None:
        """Do nothing; overridden where sums are watched."""

    def _loss_made_leaf(self, tensor: Tensor, site: Site, state: State) -> None:
        made = state.heap.get((tensor, "@made leaf"))
        if isinstance(made, Site):
            self.report(
                "GS702", "loss_made_leaf", made, state, YES, {"name": tensor.text or "?", "line": _line(site)},
                [("created", made), ("used", site)],
            )  # fmt: skip

    def escape(self, value: Value, node: ast.AST, state: State, level: int) -> None:
        """Let a value with its graph leave the analysed code: a backward will run. ``level`` bounds its certainty."""
        values = [value]
        if isinstance(value, Sequence):
            values = list(state.heap.get((value, "@items"), ()))  # type: ignore[call-overload]
        elif isinstance(value, Dictionary):
            entries = state.heap.get((value, "@entries"))
            values = list(entries.values()) if isinstance(entries, dict) else []
        for index, one in enumerate(values[:8]):
            # Further returned values may only be for inspection.
            bound = level if index == 0 else MAYBE
            for tensor in self.tensors_in(one, state):
                graph, grad = self.graph_of(tensor, state)
                if graph is not None and grad != NO:
                    self._tell_written(self._faults(graph, state), self.site(node), state, bound)

    def _faults(self, graph: Node, state: State) -> Iterator[_Fault]:
        """The faults that would stop a backward from ``graph``, in the order in which autograd runs Nodes."""
        for node in sorted(_walk(graph), key=lambda one: -one.clock):
            freed = state.freed.get(node)
            if freed is not None:
                if is_data(node):
                    continue
                yield _Fault(node, None, None, freed, MAYBE if node.is_opaque and node.grad != YES else node.grad)
                continue
            for saved in node.saved:
                fault = self._written_since(node, saved, state)
                if fault is not None:
                    yield fault

    def _written_since(self, node: Node, saved: Saved, state: State) -> _Fault | None:
        for memory in saved.memories:
            for write in state.writes.get(memory, ()):
                if write.clock > saved.clock:
                    level = saved.need
                    agree = _is_prefix(write.branches, saved.branches) or _is_prefix(saved.branches, write.branches)
                    if not agree or any(side == OPEN_SIDE for _, side in write.branches):
                        level = min(level, MAYBE)
                    return _Fault(node, saved, write, None, level)
        return None

    def _tell(self, faults: list[_Fault], site: Site, state: State, graph: Node, loss: Tensor) -> None:
        if not faults:
            return
        # A backward stops at the first; the others are known once that one is fixed.
        first = faults[0]
        is_step = first.write is not None and first.write.kind == "step"
        if (first.freed is not None or is_step) and first.node not in _walk(graph, sure=True, parts=is_step):
            first.level = min(first.level, MAYBE)
        if first.freed is not None:
            self._tell_freed(first, site, state, graph, loss)
            return
        steps = [one for one in faults if one.write is not None and one.write.kind == "step"]
        if first in steps:
            self._tell_stepped(first, site, state, graph)
            faults = [one for one in faults if one not in steps]
        self._tell_written(iter(one for one in faults if one.freed is None), site, state, YES)

    def _tell_freed(self, fault: _Fault, site: Site, state: State, graph: Node, loss: Tensor) -> None:
        assert fault.freed is not None
        values: dict[str, object] = {"name": loss.text or "?", "line": _line(fault.freed)}
        places = [("saved", fault.node.site), ("freed", fault.freed), ("used", site)]
        level = fault.level
        if not (fault.node.saved or fault.node.grad == YES):
            level = MAYBE
        freed_clock = next((clock for one, _, _, clock in self.backwards if one is fault.freed), 0)
        if graph.clock < freed_clock and self._is_own_root(fault.freed, graph):
            self.report("GS404", "same_loss_twice", site, state, level, values, places)
        elif graph.clock < freed_clock:
            self.report("GS402", "forward_shared_by_two_backwards", site, state, level, values, places)
        elif fault.freed.node is site.node and not self._is_in_round(fault.node, site):
            self.report("GS403", "graph_built_once", site, state, level, values, places)
        elif fault.freed.node is site.node:
            self.report("GS401", "freed_state_carried_over", site, state, level, values, places)
        else:
            self.report("GS402", "forward_shared_by_two_backwards", site, state, level, values, places)

    def _is_own_root(self, freed: Site, graph: Node) -> bool:
        return any(one is freed and root is graph for one, root, _, _ in self.backwards)

    def _is_in_round(self, node: Node, site: Site) -> bool:
        """Whether a Node was made by an iteration that contains ``site``, so that every iteration makes it anew."""
        first = min((one.clock for one in self._loops if one.node is not site.node), default=0)
        return node.clock > first

    def _tell_stepped(self, fault: _Fault, site: Site, state: State, graph: Node) -> None:
        assert fault.write is not None
        assert fault.saved is not None
        step = fault.write
        values: dict[str, object] = {"line": _line(step.site), "op": fault.node.op, "update": step.op}
        places = [("saved", fault.node.site), ("written", step.site), ("used", site)]
        level = fault.level
        if self._ran_again(fault.node, step, graph):
            self.report("GS111", "state_carried_over", site, state, level, values, places)
        else:
            self.report("GS110", "step_between_forward_and_backward", site, state, level, values, places)

    def _ran_again(self, node: Node, step: Write, graph: Node) -> bool:
        """Whether the code that made ``node`` has run again since the step: a carried state leads back to it."""
        return any(one.site.node is node.site.node and one.clock > step.clock for one in _walk(graph))

    def _tell_written(self, faults: Iterator[_Fault], site: Site, state: State, bound: int) -> None:
        for fault in faults:
            if fault.write is None or fault.saved is None or fault.write.kind == "step":
                continue
            write, saved = fault.write, fault.saved
            code, slug = _code_of(fault)
            if saved.slot != "input" and any(begun < saved.clock <= end < write.clock for begun, end in self.rerun):
                code, slug = "GS210", "checkpoint_closure"
            name = write.text or saved.text or "?"
            values: dict[str, object] = {
                "name": name, "op": fault.node.op, "writer": write.shown, "line": _line(fault.node.site),
                "method": write.op,
            }  # fmt: skip
            places = [("saved", fault.node.site), ("written", write.site), ("used", site)]
            if write.maker is not None:
                places.insert(0, ("created", write.maker))
            fix = {"GS103": "inplace_false", "GS101": "out_of_place", "GS102": "out_of_place"}.get(code, "")
            self.report(code, slug, write.site, state, min(fault.level, bound), values, places, fix)

    # -- optimizers

    def weights_of(self, owners: tuple[Value, ...], state: State) -> list[Memory]:
        """The memories of all parameters of modules, and of tensors among them."""
        found: list[Memory] = []
        pending: list[Value] = list(owners)
        seen: set[Value] = set()
        while pending and len(seen) < 400:
            owner = pending.pop()
            if owner in seen:
                continue
            seen.add(owner)
            if isinstance(owner, Tensor):
                if owner.owners:
                    pending.extend(owner.owners)
                else:
                    found.extend(owner.memories)
                    known = state.heap.get((owner, "@weights"))
                    if isinstance(known, Tensor):
                        found.extend(known.memories)
            elif isinstance(owner, Layer):
                found.append(owner.weights)
            else:
                pending.extend(self.parts_of(owner, state))
        return found

    def parts_of(self, owner: Value, state: State) -> list[Value]:
        """The modules and parameters that an object, a container or a list of parameters contains."""
        if isinstance(owner, Parameters):
            return list(owner.owners)
        if isinstance(owner, Sequence | Bag):
            return self.held(owner, state)
        if isinstance(owner, Dictionary):
            entries = state.heap.get((owner, "@entries"))
            return list(entries.values()) if isinstance(entries, dict) else []
        if isinstance(owner, Object):
            names = state.heap.get((owner, "@names"), ())
            values = [state.heap.get((owner, name)) for name in names]  # type: ignore[attr-defined]
            return [
                one
                for one in values
                if isinstance(one, Layer | Object | Bag)
                or (isinstance(one, Tensor) and (one.is_leaf or not one.is_certain))
            ]
        return []

    def step(self, optimizer: Optimizer, node: ast.AST, state: State) -> None:
        """Let an optimizer write all its parameters."""
        owned = state.heap.get((optimizer, "@owned"))
        lost = state.heap.get((optimizer, "@lost"))
        site = self.site(node)
        if isinstance(lost, tuple) and lost:
            made, name = lost[0], lost[1]
            self.report(
                "GS420", "leaf_lost", made, state, YES, {"name": name, "line": _line(optimizer.site)},
                [("created", optimizer.site), ("written", made), ("used", site)],
            )  # fmt: skip
        if not isinstance(owned, tuple):
            return
        made_write = Write(self.tick(), site, f"{optimizer.kind}.step", "step", state.branches, "", True)
        memories = dict.fromkeys(self.weights_of(owned, state))
        held = state.heap.get(_FILLED)
        filled = [one for one in memories if one in held] if isinstance(held, frozenset) else []
        # Where none is known to have a gradient, the backward was in code not analysed.
        for memory in filled or memories:
            state.writes[memory] = (*state.writes.get(memory, ()), made_write)

    def constant(self, value: Value | None) -> object:
        """The value of a constant; ``...`` where it is not known."""
        return value.value if isinstance(value, Plain) and value.known else ...


def _walk(graph: Node, *, sure: bool = False, parts: bool = True) -> list[Node]:
    """All Nodes below ``graph``; ``sure``: not through values that may be others, or results of code not analysed.

    ``parts``: through one of several results of such code, too; each may have a graph of its own.
    """
    found: dict[Node, None] = {graph: None}
    pending = [graph]
    while pending and len(found) < NODES_WALKED:
        node = pending.pop()
        if sure and not parts and node.op == "part":
            continue
        if sure and (node.op == "either" or (node.is_opaque and not node.saved and node is not graph)):
            continue
        for parent in node.parents:
            if isinstance(parent, Node) and parent not in found:
                found[parent] = None
                pending.append(parent)
    return list(found)


def _code_of(fault: _Fault) -> tuple[str, str]:
    write, saved = fault.write, fault.saved
    assert write is not None
    assert saved is not None
    if not write.counted:
        return ("GS203", "memory_alias") if write.kind == "array" else ("GS202", "data_attribute")
    if write.kind == "module":
        return "GS103", "inplace_module"
    if saved.is_output:
        return "GS101", "result_overwritten"
    if write.kind == "setitem" and saved.is_part:
        return "GS104", "buffer_filled_in_loop"
    if not saved.carries:
        return "GS105", "input_changed_between_passes"
    return "GS102", "operand_overwritten"


def _is_prefix(one: tuple[object, ...], other: tuple[object, ...]) -> bool:
    return one == other[: len(one)]


def _line(site: Site) -> int:
    return getattr(site.node, "lineno", 0)
