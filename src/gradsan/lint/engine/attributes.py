"""Attributes in the abstract interpreter."""

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

_METADATA = words(
    """
    shape device dtype ndim is_cuda layout names itemsize nbytes is_leaf grad_fn requires_grad
    """
)


class Attributes(Calls):
    """Interpreter of attribute reads."""

    def attribute(self, owner: Value, name: str, node: ast.AST, state: State) -> Value:
        """See :class:`Base`."""
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
            found = value if found is None else self.merge(found, value, state.way)
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
