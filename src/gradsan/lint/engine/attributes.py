"""Attributes and containers in the abstract interpreter: reads, displays, elements, comprehensions."""

from __future__ import annotations

import ast

from gradsan.lint.engine.calls import Calls
from gradsan.lint.engine.state import State
from gradsan.lint.engine.values import (
    MAYBE,
    NO,
    YES,
    Bag,
    Choice,
    ClassValue,
    Dictionary,
    Layer,
    Memory,
    Method,
    Node,
    Object,
    Optimizer,
    Parameters,
    Path,
    Plain,
    Sequence,
    Tensor,
    Value,
    words,
)
from gradsan.source.identifiers import chain_key

_METADATA = words(
    """
    shape device dtype ndim is_cuda layout names itemsize nbytes is_leaf grad_fn requires_grad
    """
)


class Attributes(Calls):
    """Interpreter of attribute reads."""

    def attribute(self, owner: Value, name: str, node: ast.AST, state: State) -> Value:
        if isinstance(owner, Path):
            return Path(f"{owner.name}.{name}")
        held = state.heap.get((owner, name))
        if held is not None and not isinstance(held, int | tuple | dict) and name != "grad":
            return held  # type: ignore[return-value]
        if isinstance(owner, Tensor):
            return self._of_tensor(owner, name, node, state)
        if isinstance(owner, Object):
            return self._of_object(owner, name, node, state)
        if isinstance(owner, Layer):
            if name in ("weight", "bias") or name.startswith(("weight_", "bias_")):
                return self.parameter_of(owner, state) if owner.has_weights else self.fresh(certain=True)
            if name == "training":
                return Plain(True, True)
            return Method(owner, name) if name not in ("in_features", "out_features", "in_channels") else Plain()
        if isinstance(owner, ClassValue):
            function = self.find_function(owner, name)
            if function is not None:
                return function
            return next(
                (one.attributes[name] for one in self.order_of(owner) if name in one.attributes), Method(owner, name)
            )
        if isinstance(owner, Choice):
            return self._of_choice(owner, name, node, state)
        if isinstance(owner, Bag | Sequence | Dictionary | Optimizer | Parameters):
            if isinstance(owner, Optimizer) and name == "param_groups":
                return Plain()
            return Method(owner, name)
        return Method(owner, name) if isinstance(owner, Plain) else Plain()

    def _of_choice(self, owner: Choice, name: str, node: ast.AST, state: State) -> Value:
        found: Value | None = None
        for one in owner.values:
            if isinstance(one, Plain):
                continue
            value = self.attribute(one, name, node, state)
            if isinstance(value, Method):
                # The call decides on which of them it is called.
                return value if found is None else found
            found = value if found is None else self.merge(found, value, state.branches)
        return Plain() if found is None else found

    def _of_tensor(self, owner: Tensor, name: str, node: ast.AST, state: State) -> Value:
        if name in _METADATA:
            return Plain()
        if name in ("T", "mT", "H", "mH", "real", "imag"):
            return self.view(owner, "view", node, state)
        if name == "data":
            if owner.is_array or not owner.is_certain:
                return self._unknown_attribute(owner, name, node, state)
            made = self.view(owner, "", node, state, cut=True)
            made.is_counted = False
            made.text = owner.text
            return made
        if name == "grad":
            return self._gradient_of(owner, node, state)
        is_called = isinstance(self._parent_call, ast.Call) and self._parent_call.func is node
        if not owner.is_certain and not is_called:
            return self._unknown_attribute(owner, name, node, state)
        return Method(owner, name)

    _parent_call: ast.AST | None = None

    def _unknown_attribute(self, owner: Tensor, name: str, node: ast.AST, state: State) -> Value:
        known = state.heap.get((owner, name))
        if isinstance(known, Tensor):
            return known
        if name == "training":
            return Plain(True, True)
        grad = NO if owner.is_certain and owner.grad == NO else MAYBE
        made = self.fresh(grad=grad, text=f"{owner.text}.{name}" if owner.text else name)
        made.is_array = owner.is_array
        if owner.node is not None:
            # The attributes of an unknown value are separate values, each with a graph of its own.
            made.node = Node("part", (owner.node,), (), self.site(node), made.clock, grad, is_opaque=True)
        state.heap[owner, name] = made
        return made

    def _gradient_of(self, owner: Tensor, node: ast.AST, state: State) -> Value:
        known = state.heap.get((owner, "@grad value"))
        graph, grad = self.graph_of(owner, state)
        is_made = graph is not None and grad == YES and graph.op not in ("to", "either", "part") and not graph.is_opaque
        if is_made and owner.is_certain and (owner, "@retained") not in state.heap:
            site = self.site(node)
            assert graph is not None
            # ``items`` of ``items[i].grad`` may be a list as well as a tensor.
            level = MAYBE if isinstance(graph.site.node, ast.Subscript) else YES
            self.report(
                "GS409", "gradient_of_non_leaf", site, state, level,
                {"name": owner.text or "?", "line": getattr(graph.site.node, "lineno", 0), "op": graph.op},
                [("created", graph.site), ("used", site)],
            )  # fmt: skip
        if isinstance(known, Tensor):
            return known
        made = Tensor((Memory(),), NO, None, self.tick(), text=f"{owner.text}.grad" if owner.text else "")
        state.heap[owner, "@grad value"] = made
        return made

    def _of_object(self, owner: Object, name: str, node: ast.AST, state: State) -> Value:
        for one in self.order_of(owner.kind):
            function = one.functions.get(name)
            if function is not None:
                decorators = [_last_name(part) for part in getattr(function.node, "decorator_list", ())]
                if any(part in ("property", "cached_property") for part in decorators):
                    return self.run_function(function, [], {}, state, owner)
                if "staticmethod" in decorators:
                    return function
                return Method(owner, name, function)
            if name in one.attributes:
                return one.attributes[name]
        if name == "training":
            return Plain(True, True)
        layer = state.heap.get((owner, "@layer"))
        if isinstance(layer, Layer) and name in ("weight", "bias"):
            return self.parameter_of(layer, state)
        if isinstance(self._parent_call, ast.Call) and self._parent_call.func is node:
            return Method(owner, name)
        if name == "optimizers":
            return self._method_of_module(owner, name, [], {}, node, state)
        made = self.fresh(text=f"self.{name}")
        self.given.add(made)
        self.set_attribute(owner, name, made, state)
        return made


def _last_name(node: ast.expr) -> str:
    if isinstance(node, ast.Call):
        return _last_name(node.func)
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


class Elements(Attributes):
    """Interpreter of containers and indices."""

    def _sequence(self, node: ast.Tuple | ast.List | ast.Set, state: State) -> Value:
        made = Sequence("tuple" if isinstance(node, ast.Tuple) else "list")
        items: list[Value] = []
        for one in node.elts:
            if isinstance(one, ast.Starred):
                value = self.evaluate(one.value, state)
                items += self.items_of(value, state)
            else:
                items.append(self.evaluate(one, state))
        state.heap[made, "@items"] = tuple(items[:60])
        return made

    def _dictionary(self, node: ast.Dict, state: State) -> Value:
        made = Dictionary()
        entries: dict[object, Value] = {}
        for key, value in zip(node.keys, node.values, strict=True):
            held = self.evaluate(value, state)
            if key is not None:
                entries[self._key(key, state)] = held
        state.heap[made, "@entries"] = entries
        return made

    def _key(self, node: ast.expr, state: State) -> object:
        known = self.constant(self.evaluate(node, state))
        return known if isinstance(known, str | int | float | bool) else ...

    def _element(self, node: ast.Subscript, state: State) -> Value:
        owner = self.evaluate(node.value, state)
        return self.element(owner, node, state)

    def element(self, owner: Value, node: ast.Subscript, state: State) -> Value:
        """The value of ``owner[…]``."""
        if isinstance(owner, Choice):
            owner = next((one for one in owner.values if not isinstance(one, Plain)), Plain())
        if isinstance(owner, Dictionary):
            held = state.heap.get((owner, "@entries"))
            key = self._key(node.slice, state)
            if isinstance(held, dict) and key in held:
                return held[key]  # type: ignore[no-any-return]
            values = list(held.values()) if isinstance(held, dict) else []
            if key is ... and values:
                return self._any_of(values, state)
            return self.fresh()
        if isinstance(owner, Sequence | Bag):
            items: tuple[Value, ...] = state.heap.get((owner, "@items"), ())  # type: ignore[assignment]
            if isinstance(node.slice, ast.Slice):
                return self._slice(owner, node.slice, items, state)
            index = self.constant(self.evaluate(node.slice, state))
            if isinstance(index, int) and -len(items) <= index < len(items):
                return items[index]
            return self._any_of(list(items), state) if items else self.fresh()
        if isinstance(owner, Tensor):
            index_kind = self.index_kind(node.slice, state)
            if owner.is_certain and not owner.is_array and index_kind == "view":
                made = self.view(owner, "view", node, state)
                made.text = chain_key(node) or chain_key(node.value) or ""
                return made
            if owner.is_certain and index_kind == "copy" and not owner.is_array:
                return self.apply("none", [owner], node, state, "index")
            if owner.is_certain and not owner.is_array:
                return self.copied(owner, node, state)
            key = self._key(node.slice, state)
            if key is not ... and isinstance(key, str | int):
                return self._item_of_unknown(owner, key, state)
            return self.part_of(owner, state)
        return Plain() if isinstance(owner, Plain) else self.fresh()

    def _slice(self, owner: Sequence | Bag, node: ast.Slice, items: tuple[Value, ...], state: State) -> Value:
        first = None if node.lower is None else self.constant(self.evaluate(node.lower, state))
        last = None if node.upper is None else self.constant(self.evaluate(node.upper, state))
        made: Sequence | Bag = Bag(owner.kind) if isinstance(owner, Bag) else Sequence("list")
        if isinstance(first, int | None) and isinstance(last, int | None) and node.step is None:
            state.heap[made, "@items"] = items[first:last]
        elif node.lower is None and node.upper is None:
            state.heap[made, "@items"] = items[::-1]
        else:
            state.heap[made, "@items"] = (self._any_of(list(items), state),) * 2 if items else ()
        return made

    def _item_of_unknown(self, owner: Tensor, key: object, state: State) -> Tensor:
        name = f"[{key!r}]"
        known = state.heap.get((owner, name))
        if isinstance(known, Tensor):
            return known
        made = self.part_of(owner, state)
        state.heap[owner, name] = made
        return made

    def _any_of(self, values: list[Value], state: State) -> Value:
        result = values[0]
        for one in values[1:6]:
            result = self.merge(result, one, state.branches)
        return result

    def index_kind(self, node: ast.expr, state: State) -> str:
        """``view`` for slices and numbers, ``copy`` for masks and lists, ``""`` where it is not known."""
        parts = node.elts if isinstance(node, ast.Tuple) else [node]
        kinds = [self._part_kind(part, state) for part in parts]
        if "copy" in kinds:
            return "copy"
        return "view" if all(kind == "view" for kind in kinds) else ""

    def _part_kind(self, node: ast.expr, state: State) -> str:
        if isinstance(node, ast.Slice):
            return "view"
        if isinstance(node, ast.List | ast.Compare):
            return "copy"
        value = self.evaluate(node, state)
        if isinstance(value, Plain):
            return "view"
        if isinstance(value, Sequence):
            return "copy"
        return "copy" if isinstance(value, Tensor) and value.is_certain else ""

    def _comprehension(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp, state: State) -> Value:
        made: Sequence | Dictionary = Dictionary() if isinstance(node, ast.DictComp) else Sequence("list")
        first = node.generators[0]
        over = self.evaluate(first.iter, state)
        if isinstance(node, ast.DictComp):
            element: ast.expr = node.value
        else:
            element = node.elt
        if isinstance(over, Parameters) and isinstance(element, ast.Name):
            return Parameters(over.owners)
        found: list[Value] = []
        for item in self.rounds_of(over, first.iter, state)[:6]:
            self.assign(first.target, item, state)
            for further in node.generators[1:]:
                for inner in self.rounds_of(self.evaluate(further.iter, state), further.iter, state)[:1]:
                    self.assign(further.target, inner, state)
            for test in first.ifs:
                self.evaluate(test, state)
            found.append(self.evaluate(element, state))
        if isinstance(node, ast.DictComp):
            state.heap[made, "@entries"] = {f"?{index}": one for index, one in enumerate(found)}
        else:
            state.heap[made, "@items"] = tuple(found)
        return made

    def assign(self, target: ast.expr, value: Value, state: State) -> None:
        """See :class:`Statements`."""
        raise NotImplementedError
