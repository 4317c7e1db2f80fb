"""Tensor methods and torch functions in the abstract interpreter, by name."""

from __future__ import annotations

import ast
from collections.abc import Callable

from gradsan.lint.engine.modules import Modules
from gradsan.lint.engine.state import State
from gradsan.lint.engine.tables import operation, without_gradient
from gradsan.lint.engine.values import (
    MAYBE,
    NO,
    YES,
    Dictionary,
    Function,
    Memory,
    Node,
    Optimizer,
    Parameters,
    Plain,
    Sequence,
    Tensor,
    Value,
    words,
)
from gradsan.source.methods import ALIASING_METHODS, CHANGING_METADATA, PIECES, is_inplace_method, is_inplace_name

_EXPANDING = frozenset({"expand", "expand_as", "broadcast_to"})
# Certain views; other ALIASING_METHODS may copy.
_VIEWS = words(
    """
    as_strided diagonal movedim moveaxis narrow permute real imag select squeeze swapaxes swapdims t transpose
    unfold unsqueeze view view_as
    """
)
_TELLS_TENSOR = words(
    """
    view permute unsqueeze contiguous sigmoid softmax log_softmax relu detach chunk masked_fill masked_fill_
    index_add_ scatter_add_ requires_grad_ unbind bmm matmul clamp_ mul_ add_ sub_ div_ zero_ fill_ copy_
    backward expand expand_as tanh detach_
    """
)
_NUMBERS = words(
    """
    item tolist size dim numel stride nelement ndimension __len__ element_size is_contiguous get_device
    """
)
_INTEGERS = frozenset(["long", "int", "short", "bool", "byte", "char"])
_REDUCED = frozenset({"max", "min", "median", "mode", "kthvalue", "cummax", "cummin"})
_CREATED = words(
    """
    tensor as_tensor zeros ones full empty randn rand arange linspace zeros_like ones_like randn_like
    rand_like full_like empty_like eye
    """
)


class Methods(Modules):
    """Interpreter of calls by name."""

    def tensor_method(
        self, owner: Tensor, name: str, args: list[Value], keywords: dict[str, Value], node: ast.AST, state: State
    ) -> Value:
        """Interpret ``owner.name(…)`` of a tensor, or of a value that may be one."""
        if name in ("items", "values", "keys", "get"):
            # The assumed tensor is a dict here.
            return self.fresh()
        if name == "backward" and not _is_of_tensor(args, keywords, self.tensor_of):
            # ``layer.backward(x, gradient)``, ``cam.backward(index=i)``: not that of a tensor
            return self.fresh()
        if name == "backward" and not owner.is_certain and args:
            given = self.tensor_of(args[0])
            if given is not None and self.graph_of(given, state)[1] != NO:
                # ``accelerator.backward(loss)``, ``engine.backward(loss)``
                self.run_backward(given, keywords, args[2:], node, state)
                return Plain(None, True)
            if given is None or not given.is_certain:
                return self.fresh()
        if name in _TELLS_TENSOR and not owner.is_array:
            owner.is_certain = True
        if name == "backward":
            self.run_backward(owner, keywords, args[1:], node, state)
            return Plain(None, True)
        if not owner.is_certain:
            found = self.module_method(owner, name, args, keywords, node, state)
            if found is not None:
                return found
            if without_gradient(name) and name not in ("detach", "detach_", "numpy", "item", "tolist"):
                return Tensor((Memory(),), NO, None, self.tick(), is_certain=False)
            if operation(name) is None and name not in ALIASING_METHODS and not is_inplace_method(name):
                # Methods of a module other than its call need not return values that depend on its parameters.
                return self.call_unknown(owner if name == "forward" else Plain(), args, node, state, name)
        if name in _NUMBERS:
            return Plain()
        if name in ("requires_grad_", "retain_grad"):
            if name == "requires_grad_":
                flag = self.constant(args[0]) if args else True
                self.set_requires_grad(owner, flag, node, state)
            else:
                state.heap[owner, "@retained"] = 1
            return owner
        if name in ("detach", "detach_"):
            if name == "detach_":
                for memory in owner.memories:
                    state.content.pop(memory, None)
                owner_cut = self.view(owner, owner.view, node, state, cut=True)
                self.replace(owner, owner_cut, state)
                return owner_cut
            return self.view(owner, "", node, state, cut=True)
        if name in ("numpy", "__array__"):
            made = self.view(owner, "", node, state, cut=True)
            made.is_array, made.is_counted = True, False
            return made
        if owner.is_array:
            return Tensor((Memory(),), NO, None, self.tick(), is_certain=False, is_cut=True, is_array=True)
        if name in _INTEGERS:
            return Tensor((Memory(),), NO, None, self.tick())
        if name in ("register_hook", "zero_grad", "is_floating_point"):
            return Plain()
        return self.by_name(name, [owner, *args], keywords, node, state)

    def by_name(self, name: str, args: list[Value], keywords: dict[str, Value], node: ast.AST, state: State) -> Value:
        """Interpret a function of torch, or a method with its tensor first."""
        first = self.tensor_of(args[0]) if args else None
        out = self.tensor_of(keywords["out"]) if "out" in keywords else None
        if out is not None:
            return self._out(out, name, args, node, state)
        if name in _CREATED and "requires_grad" in keywords and self.constant(keywords["requires_grad"]) is True:
            return Tensor((Memory(),), YES, None, self.tick(), is_leaf=True)
        if is_inplace_name(name):
            if first is None or name in CHANGING_METADATA:
                return args[0] if args else Plain()
            return self.write(first, name, args[1:] + list(keywords.values()), node, state)
        if self.constant(keywords.get("inplace")) is True and first is not None:
            return self.write(first, f"{name}_", args[1:], node, state, kind="module", shown=name)
        if name in _EXPANDING and first is not None:
            return self.view(first, "expand", node, state)
        if name in _VIEWS and first is not None:
            return self.view(first, "view", node, state)
        if name in PIECES and first is not None:
            return self.pieces(first, node, state)
        if name in ALIASING_METHODS and first is not None:
            return self.copied(first, node, state)
        if name in _REDUCED and first is not None:
            return self._reduced(name, args, keywords, node, state)
        if name == "einsum":
            return self.apply(name, args[1:], node, state)
        if name in ("topk", "sort"):
            return self._pair_of(self.apply(name, args, node, state), state)
        if without_gradient(name):
            grad = NO
            if "requires_grad" in keywords and self.constant(keywords["requires_grad"]) is not False:
                grad = MAYBE
            return Tensor((Memory(),), grad, None, self.tick())
        if name in ("autograd_grad",):
            return Plain()
        operands = [*args, *(value for key, value in keywords.items() if key not in ("dim", "dtype"))]
        if name == "pow" and len(args) > 1:
            return self._power(args, node, state)
        made = self.apply(name, operands, node, state)
        if name in ("mean", "sum", "norm"):
            made.is_reduced = True
        return made

    def pieces(self, tensor: Tensor, node: ast.AST, state: State) -> Sequence:
        """Several views of one tensor, made by one call."""
        made = Sequence("pieces")
        shown = self.view(tensor, "pieces", node, state)
        # It does not matter which of them it is: they share memory and graph.
        state.heap[made, "@items"] = (shown,) * 8
        return made

    def _pair_of(self, values: Tensor, state: State) -> Sequence:
        made = Sequence("tuple")
        state.heap[made, "@items"] = (values, Tensor((Memory(),), NO, None, self.tick()))
        return made

    def _reduced(self, name: str, args: list[Value], keywords: dict[str, Value], node: ast.AST, state: State) -> Value:
        if len(args) > 1 and self.tensor_of(args[1]) is not None:
            return self.apply("maximum" if name == "max" else "minimum", args, node, state)
        made = self.apply("none", args[:1], node, state, name)
        return self._pair_of(made, state) if len(args) > 1 or "dim" in keywords else made

    def _power(self, args: list[Value], node: ast.AST, state: State) -> Tensor:
        base, exponent = self.tensor_of(args[0]), self.tensor_of(args[1])
        if base is not None and exponent is None:
            if self.constant(args[1]) == 1:
                return self.apply("none", args[:1], node, state, "pow")
            return self.apply("square", args[:1], node, state, "pow")
        return self.apply(
            "mul" if base is not None else "exp", args if base is not None else args[1:], node, state, "pow"
        )

    def _out(self, out: Tensor, name: str, args: list[Value], node: ast.AST, state: State) -> Tensor:
        grads = [self.graph_of(one, state)[1] for value in args for one in self.tensors_in(value, state)]
        grads.append(self.graph_of(out, state)[1])
        if state.grad and max(grads) == YES:
            site = self.site(node)
            values: dict[str, object] = {"name": out.text or "?", "op": name}
            self.report("GS302", "out_with_gradient", site, state, YES, values, [("written", site)])
        return self.write(out, f"{name}_", [], node, state, kind="out")

    # -- requires_grad

    def set_requires_grad(self, tensor: Tensor, flag: object, node: ast.AST, state: State) -> None:
        """Interpret ``tensor.requires_grad = flag``."""
        if tensor.owners:
            self.set_trains_all(tensor.owners, NO if flag is False else YES if flag is True else MAYBE, state)
            return
        graph, grad = self.graph_of(tensor, state)
        if flag is True and graph is None and grad == NO and tensor.is_certain and tensor.is_reduced and tensor.clock:
            state.heap[tensor, "@made leaf"] = self.site(node)
        if flag is True and graph is not None and tensor.is_certain and graph.op in _LOSSES:
            state.heap[tensor, "@made leaf"] = self.site(node)
        state.heap[tensor, "@grad"] = YES if flag is True else NO if flag is False else MAYBE

    def set_trains_all(self, owners: tuple[Value, ...], grad: int, state: State) -> None:
        """Set whether parameters of modules require grad."""
        for owner in owners:
            state.heap[owner, "@trains"] = grad

    def replace(self, old: Value, new: Value, state: State) -> None:
        """Replace ``old`` by ``new`` in every variable and attribute."""
        for key, value in state.names.items():
            if value is old:
                state.names[key] = new
        for place, held in state.heap.items():
            if held is old:
                state.heap[place] = new
            elif isinstance(held, tuple) and old in held:
                state.heap[place] = tuple(new if one is old else one for one in held)

    # -- backward and optimizers

    def run_backward(
        self, loss: Value, keywords: dict[str, Value], args: list[Value], node: ast.AST, state: State
    ) -> None:
        """Interpret ``loss.backward(…)``; ``args`` are those after the gradient."""
        asked = keywords.get("retain_graph") or (args[0] if args else None)
        if "create_graph" in keywords and self.constant(keywords["create_graph"]) is not False:
            retain: bool | None = True
        elif asked is None:
            retain = False
        else:
            known = self.constant(asked)
            retain = None if known is ... else bool(known)
        site = self.site(node)
        tensor = self.tensor_of(loss)
        graph = None if tensor is None else self.graph_of(tensor, state)[0]
        self.backward(loss, retain, site, state)
        if retain and "create_graph" not in keywords:
            self.keep_graph(loss, site, state)
        self.backwards.append((site, graph, bool(retain), self.tick()))

    def gradient(self, args: list[Value], keywords: dict[str, Value], node: ast.AST, state: State) -> Value:
        """Interpret ``torch.autograd.grad(…)``."""
        outputs = keywords.get("outputs") or (args[0] if args else Plain())
        inputs = keywords.get("inputs") or (args[1] if len(args) > 1 else Plain())
        create = keywords.get("create_graph")
        creates = create is not None and self.constant(create) is not False
        asked = keywords.get("retain_graph")
        retain = True if creates else (False if asked is None else bool(self.constant(asked)))
        if asked is not None and self.constant(asked) is ...:
            retain = True
        self.backward(outputs, retain, self.site(node), state, is_grad=True, inputs=inputs)
        if not creates:
            self.backwards.append((self.site(node), None, bool(retain), self.tick()))
        made = Sequence("tuple")
        tensors = self.tensors_in(outputs, state)
        grad = max((self.graph_of(one, state)[1] for one in tensors), default=MAYBE) if creates else NO
        site = self.site(node)
        items: list[Value] = []
        for _ in range(max(1, min(8, len(self.tensors_in(inputs, state)) or 8))):
            clock = self.tick()
            one = Tensor((Memory(),), grad, None, clock, constant=None if creates else site)
            if creates and grad:
                one.node = Node("grad", self._parents(tensors, state), (), site, clock, grad, is_opaque=True)
            items.append(one)
        state.heap[made, "@items"] = tuple(items)
        return made

    def make_optimizer(
        self, kind: str, args: list[Value], keywords: dict[str, Value], node: ast.AST, state: State
    ) -> Optimizer:
        """Interpret ``torch.optim.<kind>(…)``."""
        made = Optimizer(kind, self.site(node))
        params = keywords.get("params") or (args[0] if args else Plain())
        state.heap[made, "@owned"] = self.give_to_optimizer(params, state)
        state.heap[made, "@given"] = self._holders(params, state)
        return made

    def _holders(self, params: Value, state: State) -> tuple[Value, ...]:
        """The modules whose ``parameters()`` as a whole an optimizer got."""
        if isinstance(params, Parameters):
            return params.owners
        if isinstance(params, Sequence):
            items: tuple[Value, ...] = state.heap.get((params, "@items"), ())  # type: ignore[assignment]
            return tuple(one for item in items for one in self._holders(item, state))
        if isinstance(params, Dictionary):
            entries = state.heap.get((params, "@entries"))
            inner = entries.get("params") if isinstance(entries, dict) else None
            return self._holders(inner, state) if inner is not None else ()
        return ()

    def optimizer_method(self, owner: Optimizer, name: str, args: list[Value], node: ast.AST, state: State) -> Value:
        """Interpret a method of an optimizer."""
        if name == "step":
            closure = args[0] if args else None
            if isinstance(closure, Function):
                self.call(closure, [], {}, node, state)
                self.step(owner, node, state)
                if owner.kind == "LBFGS":
                    self.call(closure, [], {}, node, state)
            else:
                self.step(owner, node, state)
        elif name == "zero_grad" and not args and not getattr(node, "keywords", ()):
            given = state.heap.get((owner, "@owned"))
            if isinstance(given, tuple):
                self.clear_gradients(given, state)
        elif name == "add_param_group" and args:
            owned: tuple[Value, ...] = state.heap.get((owner, "@owned"), ())  # type: ignore[assignment]
            state.heap[owner, "@owned"] = (*owned, *self.give_to_optimizer(args[0], state))
            state.heap.pop((owner, "@lost"), None)
        return Plain()


def _is_of_tensor(args: list[Value], keywords: dict[str, Value], tensor_of: Callable[[Value], Tensor | None]) -> bool:
    """Whether a call of ``backward`` matches the signature of a tensor's."""
    return keywords.keys() <= _OF_BACKWARD and len(args) <= 4 and all(tensor_of(one) is None for one in args[1:])


_OF_BACKWARD = words("gradient retain_graph create_graph inputs")
_LOSSES = words(
    """
    mse_loss cross_entropy nll_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy MSELoss
    CrossEntropyLoss binary_cross_entropy_with_logits kl_div NLLLoss L1Loss SmoothL1Loss HuberLoss BCELoss
    BCEWithLogitsLoss KLDivLoss mean sum
    """
)
