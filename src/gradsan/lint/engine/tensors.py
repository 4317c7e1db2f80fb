"""Tensor operations in the abstract interpreter: the operands that they save, their writes, and their graph."""

from __future__ import annotations

import ast
from dataclasses import replace

from gradsan.lint.engine.base import Base
from gradsan.lint.engine.state import State
from gradsan.lint.engine.tables import Operation, operation
from gradsan.lint.engine.values import (
    MAYBE,
    NO,
    YES,
    Choice,
    Content,
    Layer,
    Memory,
    Node,
    Plain,
    Saved,
    Sequence,
    Site,
    Tensor,
    Value,
    Write,
    words,
)
from gradsan.source.identifiers import chain_key

_REDUCING = frozenset({"mean", "sum", "norm", "mse_loss", "prod", "logsumexp"})
_PASSING_CONSTANTS = words(
    """
    add sub rsub neg mean sum div mul pow square norm sqrt
    """
)


class Tensors(Base):
    """Interpreter of computations, views and writes."""

    # -- the current state of a tensor

    def graph_of(self, tensor: Tensor, state: State) -> tuple[Node | None, int]:
        """The ``grad_fn`` Node of a tensor, None for a leaf and without a graph, and whether it requires grad."""
        noted = state.heap.get((tensor, "@grad"))
        if noted is not None and tensor.node is None:
            return None, noted  # type: ignore[return-value]
        node, grad = tensor.node, tensor.grad
        if tensor.is_cut or not tensor.is_counted:
            return None, NO
        if tensor.owners:
            return None, self.trains(tensor.owners, state)
        if state.content:
            for memory in tensor.memories:
                content = state.content.get(memory)
                if content is not None and content.clock > tensor.clock:
                    grad = max(grad, content.grad)
                    if len(tensor.memories) == 1 or node is None or content.node is None:
                        node = content.node or node
                    elif content.node is not node:
                        # One of several tensors that it may be has been written.
                        node = Node("either", (node, content.node), (), node.site, content.clock, grad)
        return node, grad

    def is_leaf(self, tensor: Tensor, state: State) -> bool:
        """Whether a tensor is surely a leaf that requires grad."""
        node, grad = self.graph_of(tensor, state)
        noted = state.heap.get((tensor, "@grad"))
        return node is None and grad == YES and (tensor.is_leaf or bool(tensor.owners) or noted == YES)

    def trains(self, owners: tuple[Value, ...], state: State) -> int:
        """Whether the parameters of modules require grad."""
        found = NO
        for owner in owners:
            noted = state.heap.get((owner, "@trains"))
            own: int = noted if isinstance(noted, int) else (YES if isinstance(owner, Layer) else 1)
            found = max(found, own)
        return found

    def tensor_of(self, value: Value) -> Tensor | None:
        """The tensor that a value is, or may be."""
        if isinstance(value, Tensor):
            return value
        if isinstance(value, Choice):
            return next((one for one in value.values if isinstance(one, Tensor)), None)
        return None

    def tensors_in(self, value: Value, state: State, depth: int = 3) -> list[Tensor]:
        """All tensors in a value and in nested containers."""
        tensor = self.tensor_of(value)
        if tensor is not None:
            return [tensor]
        if isinstance(value, Choice):
            return [one for part in value.values for one in self.tensors_in(part, state, depth - 1)]
        items: list[Value] = []
        if isinstance(value, Sequence):
            items = list(state.heap.get((value, "@items"), ()))  # type: ignore[call-overload]
        else:
            entries = state.heap.get((value, "@entries"))
            items = list(entries.values()) if isinstance(entries, dict) else []
        return [one for item in items[:40] for one in self.tensors_in(item, state, depth - 1)] if depth else []

    # -- operations

    def apply(self, name: str, args: list[Value], node: ast.AST, state: State, shown: str = "") -> Tensor:
        """The result of an operation on ``args``, with its saved tensors and its graph."""
        found = operation(name)
        self.look_at_views(args, node, state)
        clock = self.tick()
        result = Tensor((Memory(),), NO, None, clock, text=_text(node))
        operands = [(index, tensor) for index, value in enumerate(args) for tensor in self.tensors_in(value, state)]
        result.is_reduced = bool(operands) and all(one.is_reduced for _, one in operands)
        self._constants(name, operands, result, state)
        if any(isinstance(value, Sequence) and not self.tensors_in(value, state) for value in args):
            result.grad = MAYBE if state.grad else NO
            result.is_certain = False
        elif state.grad and (not operands or any(_is_open(value) for value in args)):
            # An unknown value may be a tensor that requires grad, too.
            result.grad = MAYBE
        if not state.grad:
            return result
        known = {index: self.graph_of(tensor, state) for index, tensor in operands}
        grad = max((graph[1] for graph in known.values()), default=NO)
        if len(known) < len(operands):
            grad = max(self.graph_of(tensor, state)[1] for _, tensor in operands)
        if grad == NO:
            return result
        result.grad = max(grad, result.grad)
        parents = self._parents([tensor for _, tensor in operands], state)
        saved = () if found is None else self._kept(found, args, result, node, state, clock)
        is_open = any(_is_open(value) for value in args)
        result.node = Node(shown or name, parents, saved, self.site(node), clock, grad, is_open=is_open)
        return result

    def _parents(self, tensors: list[Tensor], state: State) -> tuple[Node | Tensor, ...]:
        parents: list[Node | Tensor] = []
        for tensor in tensors:
            node, grad = self.graph_of(tensor, state)
            if node is not None:
                parents.append(node)
            elif grad != NO:
                parents.append(tensor)
        return tuple(dict.fromkeys(parents))

    def _kept(
        self, found: Operation, args: list[Value], result: Tensor, node: ast.AST, state: State, clock: int
    ) -> tuple[Saved, ...]:
        inputs: dict[str, Value] = dict(zip(found.inputs, args, strict=False))
        grads: dict[str, int] = {}
        if state.hooked:
            return ()
        for name, value in inputs.items():
            tensor = self.tensor_of(value)
            grads[name] = NO if tensor is None else self.graph_of(tensor, state)[1]
        saved: list[Saved] = []
        for slot in found.slots:
            need = max((grads.get(one, NO) for group in slot.asked_for for one in group), default=NO)
            if need == NO:
                continue
            if slot.is_output:
                if found.keeps_result and slot.name in ("result", "result0", "output"):
                    memories = result.memories
                    saved.append(Saved(memories, clock, slot.name, need, state.branches, True, result.text))
                continue
            tensor = self.tensor_of(inputs[slot.name]) if slot.name in inputs else None
            if tensor is not None and tensor.memories:
                is_part = tensor.view in ("view", "pieces")
                carries = self.graph_of(tensor, state)[1] != NO
                saved.append(
                    Saved(
                        tensor.memories, clock, slot.name, need, state.branches, False, tensor.text, is_part, carries,
                        tensor.owners,
                    )
                )  # fmt: skip
        return tuple(saved)

    def _constants(self, name: str, operands: list[tuple[int, Tensor]], result: Tensor, state: State) -> None:
        """Mark results computed only from gradients without a graph, and sums with such terms."""
        for _, tensor in operands:
            if tensor.constant is not None or tensor.terms:
                break
        else:
            return
        constants = [one for _, one in operands if one.constant is not None]
        others = [one for _, one in operands if one.constant is None]
        moving = [one for one in others if self.graph_of(one, state)[1] != NO]
        if constants and not moving:
            result.constant = constants[0].constant
            result.is_reduced = name in _REDUCING or all(one.is_reduced for one in constants)
        if name in ("add", "sub") and moving and constants and all(one.is_reduced for one in constants):
            result.terms = frozenset(one.constant for one in constants if one.constant is not None)
        if name in _PASSING_CONSTANTS:
            result.terms = result.terms.union(*(one.terms for _, one in operands))

    def look_at_views(self, args: list[Value], node: ast.AST, state: State) -> None:
        """Report the use of one of several views of a call after its memory was written (GS304)."""
        for value in args:
            tensor = self.tensor_of(value)
            if tensor is None or tensor.view != "pieces" or not state.grad:
                continue
            if self.graph_of(tensor, state)[1] != YES:
                continue
            for write in state.writes.get(tensor.memories[0], ()):
                if write.clock > tensor.clock and write.kind != "step" and write.counted:
                    self.report(
                        "GS304", "view_base_written", self.site(node), state, YES,
                        {"name": tensor.text or "?", "line": getattr(write.site.node, "lineno", 0)},
                        [("written", write.site), ("used", self.site(node))],
                    )  # fmt: skip
                    return

    def view(self, tensor: Tensor, kind: str, node: ast.AST, state: State, *, cut: bool = False) -> Tensor:
        """A view of a tensor: the same memory."""
        self.look_at_views([tensor], node, state)
        graph, grad = self.graph_of(tensor, state)
        clock = self.tick()
        made = Tensor(
            tensor.memories, grad, None, clock, False, True, kind, tensor.is_cut or cut, tensor.is_counted,
            tensor.is_array, (), _text(node) or tensor.text, tensor.constant, tensor.is_reduced, tensor.terms,
            tensor.branches_of,
        )  # fmt: skip
        if tensor.view in ("expand", "pieces") and kind == "view":
            made.view = tensor.view
        if cut:
            made.grad = NO
        elif not state.grad:
            made.view = "no_grad" if grad == YES else made.view
        elif grad != NO:
            parent: Node | Tensor = graph if graph is not None else tensor
            made.node = Node(kind, (parent,), (), self.site(node), clock, grad)
        return made

    def copied(self, tensor: Tensor, node: ast.AST, state: State) -> Tensor:
        """A tensor that may be a copy or the tensor itself: its graph goes on, its memory is not followed."""
        graph, grad = self.graph_of(tensor, state)
        clock = self.tick()
        made = Tensor(
            (Memory(),), grad, None, clock, False, tensor.is_certain, "", tensor.is_cut, True, tensor.is_array, (),
            _text(node) or tensor.text, tensor.constant, tensor.is_reduced, tensor.terms,
        )  # fmt: skip
        if state.grad and grad != NO and not tensor.is_cut:
            made.node = Node("to", (graph if graph is not None else tensor,), (), self.site(node), clock, grad)
        elif not state.grad:
            made.grad = NO
        return made

    # -- writes

    def write(
        self,
        target: Tensor,
        name: str,
        operands: list[Value],
        node: ast.AST,
        state: State,
        kind: str = "inplace",
        shown: str = "",
        maker: Site | None = None,
    ) -> Tensor:
        """Change ``target`` in place by the operation ``name`` (``add_``); the result is ``target`` itself."""
        self.look_at_views(operands, node, state)
        site = self.site(node)
        _, old_grad = self.graph_of(target, state)
        grads = [self.graph_of(one, state)[1] for value in operands for one in self.tensors_in(value, state)]
        if target.is_certain and state.grad and self._refused(target, site, state, name):
            return target
        clock = self.tick()
        counted = target.is_counted and not target.is_array
        text = target.text or (_called_text(node) if kind == "module" else _written_text(node))
        shown = shown or _shown(node, name)
        made = Write(clock, site, name, kind, state.branches, text, counted, shown, maker)
        for memory in target.memories:
            branches = target.branches_of.get(memory, state.branches) if target.branches_of else state.branches
            one = made if len(branches) <= len(state.branches) else replace(made, branches=branches)
            state.writes[memory] = (*state.writes.get(memory, ()), one)
        if not state.grad or not counted or target.is_cut or target.owners:
            return target
        grad = max([old_grad, *grads])
        if name in ("zero_", "fill_", "copy_", "uniform_", "normal_") and not target.view:
            grad = max(grads, default=NO)
        if grad == NO:
            return target
        found = operation(name)
        tensors = [target, *(one for value in operands for one in self.tensors_in(value, state))]
        parents = self._parents(tensors, state)
        saved: tuple[Saved, ...] = ()
        if found is not None:
            # Autograd saves a copy of an operand that the operation itself overwrites.
            kept = self._kept(found, [target, *operands], target, node, state, clock)
            saved = tuple(one for one in kept if one.is_output or one.memories != target.memories)
        made_node = Node(name, parents, saved, site, clock, grad, is_open=any(map(_is_open, operands)))
        for memory in target.memories:
            state.content[memory] = Content(clock, made_node, grad)
        return target

    def _refused(self, target: Tensor, site: Site, state: State, name: str) -> bool:
        """Report writes that PyTorch rejects at the statement; the program stops before them."""
        where = {"name": target.text or _written_text(site.node) or "?", "op": _shown(site.node, name), "writer": name}
        level = self.graph_of(target, state)[1]
        if self.is_leaf(target, state) or (target.view == "view" and self._is_part_of_leaf(target, state)):
            self.report("GS301", "leaf_written", site, state, YES, where, [("written", site)], fix="no_grad")
        elif target.view == "expand" and target.is_counted:
            # A part of it may lie beside the repeated dimensions.
            certainty = MAYBE if where["op"] == "[...] =" else YES
            self.report("GS308", "expanded_written", site, state, certainty, where, [("written", site)])
        elif target.view == "pieces" and level == YES:
            self.report("GS303", "one_of_several_views_written", site, state, YES, where, [("written", site)])
        elif target.view == "no_grad" and not target.is_cut:
            self.report("GS305", "unrecorded_view_written", site, state, YES, where, [("written", site)])
        else:
            return False
        return True

    def _is_part_of_leaf(self, target: Tensor, state: State) -> bool:
        node = target.node
        while node is not None and node.op == "view" and len(node.parents) == 1:
            parent = node.parents[0]
            if isinstance(parent, Tensor):
                return self.is_leaf(parent, state) and not any(m in state.content for m in parent.memories)
            node = parent
        return False


def _is_open(value: Value) -> bool:
    return isinstance(value, Plain) and (not value.known or value.value is None)


def _text(node: ast.AST) -> str:
    """The name of the value of an expression; empty for a call."""
    return (chain_key(node) or "") if isinstance(node, ast.Name | ast.Attribute) else ""


def _called_text(node: ast.AST) -> str:
    """The name of a value inside of a call: ``self.layers(…)``."""
    called = chain_key(node.func) if isinstance(node, ast.Call) else None
    return f"{called}(…)" if called else ""


def _written_text(node: ast.AST) -> str:
    if isinstance(node, ast.AugAssign):
        node = node.target
    elif isinstance(node, ast.Call):
        out = next((one.value for one in node.keywords if one.arg == "out"), None)
        node = out if out is not None else getattr(node.func, "value", node)
    # Unparsing an expression is slow; most of these are never shown.
    return chain_key(node) or chain_key(getattr(node, "value", node)) or ""


_SYMBOLS: dict[type[ast.operator], str] = {
    ast.Add: "+=",
    ast.Sub: "-=",
    ast.Mult: "*=",
    ast.Div: "/=",
    ast.Pow: "**=",
}


def _shown(node: ast.AST, name: str) -> str:
    """The source spelling of an in-place operation: ``+=``, ``[...] =``, ``add_``."""
    if isinstance(node, ast.AugAssign):
        return _SYMBOLS.get(type(node.op), name)
    return "[...] =" if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store) else name
