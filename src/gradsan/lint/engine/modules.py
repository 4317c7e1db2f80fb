"""Modules in the abstract interpreter: layers of ``torch.nn``, containers, their parameters, and their calls."""

from __future__ import annotations

import ast

from gradsan.lint.engine.graph import Graph
from gradsan.lint.engine.state import State
from gradsan.lint.engine.tables import layer_operation
from gradsan.lint.engine.values import (
    MAYBE,
    NO,
    YES,
    Bag,
    Choice,
    Dictionary,
    Layer,
    Memory,
    Node,
    Object,
    Parameters,
    Plain,
    Saved,
    Sequence,
    Tensor,
    Value,
    words,
)
from gradsan.source.flow.modules import in_place_argument

_CONTAINERS = frozenset({"Sequential", "ModuleList", "ModuleDict", "ParameterList"})
_SAME = words(
    """
    to cuda cpu half float double bfloat16 type train eval requires_grad_ apply share_memory xpu compile
    to_empty
    """
)


class Modules(Graph):
    """Interpreter of modules: construction, calls, parameters."""

    def make_layer(
        self, kind: str, args: list[Value], keywords: dict[str, Value], node: ast.AST, state: State
    ) -> Value:
        """Interpret ``nn.<kind>(…)``."""
        if kind in _CONTAINERS:
            return self._make_container(kind, args, state)
        if kind == "Parameter":
            given = self.constant(keywords.get("requires_grad") or (args[1] if len(args) > 1 else None))
            grad = (
                NO if given is False else (YES if given in (True, ...) and "requires_grad" not in keywords else MAYBE)
            )
            grad = YES if given is True else grad
            return Tensor((Memory(),), grad, None, self.tick(), is_leaf=grad == YES)
        known = layer_operation(kind)
        inplace = self.constant(keywords.get("inplace")) is True
        if not inplace and "inplace" not in keywords and isinstance(node, ast.Call):
            inplace = in_place_argument(node) is not None
        has_weights = known is not None and known[1]
        if self.constant(keywords.get("affine")) is False or self.constant(keywords.get("elementwise_affine")) is False:
            has_weights = False
        if kind.startswith("InstanceNorm") and self.constant(keywords.get("affine")) is True:
            has_weights = True
        return Layer(kind, self.site(node), Memory(), inplace, has_weights)

    def _make_container(self, kind: str, args: list[Value], state: State) -> Value:
        made = Bag(kind)
        items: list[Value] = []
        for value in args:
            held = value
            if isinstance(held, Dictionary):
                entries = state.heap.get((held, "@entries"))
                items += list(entries.values()) if isinstance(entries, dict) else []
                state.heap[made, "@entries"] = dict(entries) if isinstance(entries, dict) else {}
            elif isinstance(held, Sequence):
                items += list(state.heap.get((held, "@items"), ()))  # type: ignore[call-overload]
            else:
                items.append(held)
        state.heap[made, "@items"] = tuple(items)
        return made

    # -- parameters

    def parameter_of(self, layer: Layer, state: State) -> Tensor:
        """The parameter of a layer; one tensor stands for all of them."""
        known = state.heap.get((layer, "@parameter"))
        if isinstance(known, Tensor):
            return known
        made = Tensor((layer.weights,), YES, None, 0, owners=(layer,))
        state.heap[layer, "@parameter"] = made
        return made

    def weights_of_unknown(self, module: Tensor, state: State) -> Tensor:
        """The parameters of something that may be a module."""
        known = state.heap.get((module, "@weights"))
        if isinstance(known, Tensor):
            return known
        made = Tensor((Memory(),), MAYBE, None, 0, owners=(module,))
        state.heap[module, "@weights"] = made
        return made

    def leaves_of(self, owner: Value, state: State) -> tuple[Value, ...]:
        """The layers, tensors and unknown modules that an object contains."""
        found: list[Value] = []
        pending: list[Value] = [owner]
        seen: set[Value] = set()
        while pending and len(seen) < 400:
            one = pending.pop(0)
            if one in seen:
                continue
            seen.add(one)
            if isinstance(one, Choice):
                pending.extend(one.values)
            elif isinstance(one, Layer):
                if one.has_weights:
                    found.append(one)
            elif isinstance(one, Tensor):
                pending.extend(one.owners)
                if not one.owners:
                    found.append(one)
            else:
                pending.extend(self.parts_of(one, state))
        return tuple(found)

    def set_trains(self, owner: Value, grad: int, state: State) -> None:
        """Interpret ``requires_grad_()`` of a module, or of the parameters of one."""
        for leaf in self.leaves_of(owner, state):
            if isinstance(leaf, Tensor) and leaf.is_certain:
                state.heap[leaf, "@grad"] = grad
            else:
                state.heap[leaf, "@trains"] = grad

    def give_to_optimizer(self, params: Value, state: State) -> tuple[Value, ...]:
        """The owners of an optimizer's parameters, which are known to be trained from then on."""
        owners = self.leaves_of(params, state)
        for leaf in owners:
            if isinstance(leaf, Tensor) and not leaf.is_certain:
                self.weights_of_unknown(leaf, state)
                if (leaf, "@trains") not in state.heap:
                    state.heap[leaf, "@trains"] = YES
        return owners

    def module_method(
        self, owner: Value, name: str, args: list[Value], keywords: dict[str, Value], node: ast.AST, state: State
    ) -> Value | None:
        """Interpret a method that all modules have; None for another."""
        if name in ("parameters", "buffers"):
            return Parameters((owner,)) if name == "parameters" else Sequence("list")
        if name == "named_parameters":
            return Parameters((owner,), "pair")
        if name in ("children", "modules"):
            made = Sequence("list")
            state.heap[made, "@items"] = tuple(self.parts_of(owner, state))
            return made
        if name in _SAME:
            if name == "requires_grad_":
                flag = self.constant(args[0]) if args else self.constant(keywords.get("requires_grad"))
                self.set_trains(owner, NO if flag is False else YES if flag is True or not args else MAYBE, state)
            elif name == "apply" and args:
                for part in (*self.parts_of(owner, state), owner)[:12]:
                    self.call(args[0], [part], {}, node, state)
            return owner
        if name == "register_buffer" and len(args) > 1:
            self._register(owner, args, state)
            return Plain(None, True)
        if name in ("register_parameter", "add_module", "register_module") and len(args) > 1:
            self._register(owner, args, state)
            return Plain(None, True)
        if name in ("append", "insert") and isinstance(owner, Bag) and args:
            held: tuple[Value, ...] = state.heap.get((owner, "@items"), ())  # type: ignore[assignment]
            state.heap[owner, "@items"] = (*held, args[-1])
            return owner
        if name in ("extend",) and isinstance(owner, Bag) and args:
            more: tuple[Value, ...] = state.heap.get((args[0], "@items"), ())  # type: ignore[assignment]
            held = state.heap.get((owner, "@items"), ())  # type: ignore[assignment]
            state.heap[owner, "@items"] = (*held, *more)
            return owner
        if name == "zero_grad" and not args and not keywords:
            self.clear_gradients((owner,), state)
        if name in ("state_dict", "load_state_dict", "zero_grad", "register_forward_hook", "named_modules"):
            return Plain()
        if name in ("values", "items", "keys") and isinstance(owner, Bag):
            items: tuple[Value, ...] = state.heap.get((owner, "@items"), ())  # type: ignore[assignment]
            made = Sequence("list")
            state.heap[made, "@items"] = items if name == "values" else tuple(self._pair(one, state) for one in items)
            return made
        return None

    def _pair(self, value: Value, state: State) -> Value:
        made = Sequence("tuple")
        state.heap[made, "@items"] = (Plain(), value)
        return made

    def _register(self, owner: Value, args: list[Value], state: State) -> None:
        name = self.constant(args[0])
        if isinstance(name, str):
            self.set_attribute(owner, name, args[1], state)
        else:
            self.set_attribute(owner, f"?{self.tick()}", args[1], state)

    def set_attribute(self, owner: Value, name: str, value: Value, state: State) -> None:
        """Interpret ``owner.name = value``."""
        state.heap[owner, name] = value
        if isinstance(owner, Object):
            names: tuple[str, ...] = state.heap.get((owner, "@names"), ())  # type: ignore[assignment]
            if name not in names:
                state.heap[owner, "@names"] = (*names, name)

    # -- calls

    def call_layer(self, layer: Layer, args: list[Value], node: ast.AST, state: State) -> Value:
        """Call a layer."""
        known = layer_operation(layer.kind)
        given = [one for one in args if self.tensor_of(one) is not None]
        for one in given:
            tensor = self.tensor_of(one)
            if tensor is not None:
                tensor.is_certain = True
        if known is None:
            made = self._opaque(args, node, state, layer.kind, ())
            made.is_certain = True
            return made
        name = known[0]
        first = self.tensor_of(args[0]) if args else None
        if name == "identity":
            return args[0] if args else Plain()
        if name in ("flatten", "unflatten"):
            return self.copied(first, node, state) if first is not None else Plain()
        if layer.inplace and first is not None:
            return self.write(first, f"{name}_", [], node, state, "module", layer.kind, layer.site)
        weights: list[Value] = [self.parameter_of(layer, state)] if layer.has_weights else []
        if name in ("lstm", "gru", "rnn", "lstm_cell", "rnn_cell", "attention"):
            return self._recurrent(name, layer, args, weights, node, state)
        if name == "embedding":
            return self.apply(name, [*args[:1], *weights], node, state, layer.kind)
        if name == "layer_norm" or name == "group_norm" or name == "rms_norm":
            return self.apply(name, [*args[:1], Plain(), *weights], node, state, layer.kind)
        if name in ("batch_norm", "instance_norm"):
            return self.apply(name, [*args[:1], Plain(), Plain(), *weights], node, state, layer.kind)
        if layer.has_weights:
            return self.apply(name, [*args[:1], *weights], node, state, layer.kind)
        return self.apply(name, args, node, state, layer.kind)

    def _recurrent(
        self, name: str, layer: Layer, args: list[Value], weights: list[Value], node: ast.AST, state: State
    ) -> Value:
        states = [one for value in args[1:] for one in self.tensors_in(value, state)]
        made = self.apply("recurrent", [*args[:1], *weights], node, state, layer.kind)
        if made.node is not None:
            # Each time step is a product of the input, and of the state, with the weights.
            more: list[Saved] = []
            for one in states:
                carries = self.graph_of(one, state)[1] != NO
                more.append(
                    Saved(one.memories, made.clock, "hx", made.grad, state.branches, False, one.text, False, carries)
                )
            moving = max((self.graph_of(one, state)[1] for one in states), default=NO)
            if moving and not any(one.owners for one in made.node.saved):
                more.append(Saved((layer.weights,), made.clock, "weight", moving, state.branches, owners=(layer,)))
            if layer.has_weights and name in ("lstm", "gru", "rnn"):
                # The time steps of one call pass the hidden state on through the weights.
                more.append(Saved((layer.weights,), made.clock, "weight", made.grad, state.branches, owners=(layer,)))
            made.node.saved = (*made.node.saved, *more)
            made.node.parents = (*made.node.parents, *self._parents(states, state))
        if name in ("rnn_cell",):
            return made
        rest = Tensor((Memory(),), made.grad, made.node, made.clock)
        pair = Sequence("tuple")
        if name == "lstm":
            inner = Sequence("tuple")
            state.heap[inner, "@items"] = (rest, Tensor((Memory(),), made.grad, made.node, made.clock))
            state.heap[pair, "@items"] = (made, inner)
        else:
            state.heap[pair, "@items"] = (made, rest)
        return pair

    def call_bag(self, bag: Bag, args: list[Value], keywords: dict[str, Value], node: ast.AST, state: State) -> Value:
        """Call an ``nn.Sequential``."""
        result: Value = args[0] if args else Plain()
        items: tuple[Value, ...] = state.heap.get((bag, "@items"), ())  # type: ignore[assignment]
        for item in items[:40]:
            result = self.call(item, [result], {}, node, state)
        return result

    def call_unknown(self, callee: Value, args: list[Value], node: ast.AST, state: State, name: str) -> Tensor:
        """Call code that is not analysed: a function of another file, or a module."""
        modules = (callee,) if isinstance(callee, Tensor) else ()
        return self._opaque(args, node, state, name, modules)

    def _opaque(self, args: list[Value], node: ast.AST, state: State, name: str, modules: tuple[Tensor, ...]) -> Tensor:
        tensors = [one for value in args for one in self.tensors_in(value, state)]
        self.hand_on(tensors, state)
        clock = self.tick()
        made = Tensor((Memory(),), MAYBE, None, clock, is_certain=False)
        trains = self.trains(modules, state) if modules else NO
        given = max((self.graph_of(one, state)[1] for one in tensors), default=NO)
        if not state.grad:
            made.grad = NO if all(one.is_certain for one in tensors) and trains == YES else MAYBE
            return made
        made.grad = YES if trains == YES else max(MAYBE, min(given, MAYBE))
        parents = list(self._parents(tensors, state))
        saved: list[Saved] = []
        for module in modules:
            weights = self.weights_of_unknown(module, state)
            parents.append(weights)
            saved.append(Saved(weights.memories, clock, "weight", trains, state.branches, owners=(module,)))
        made.node = Node(name, tuple(parents), tuple(saved), self.site(node), clock, made.grad, is_opaque=True)
        return made
