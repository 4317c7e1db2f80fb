"""Calls in the abstract interpreter, followed into the functions and classes of the file."""

from __future__ import annotations

import ast

from gradsan.lint.engine.base import Frame
from gradsan.lint.engine.libraries import Libraries
from gradsan.lint.engine.state import State
from gradsan.lint.engine.tables import layer_operation
from gradsan.lint.engine.values import (
    MAYBE,
    Bag,
    Choice,
    ClassValue,
    Dictionary,
    Function,
    Layer,
    Method,
    Node,
    Object,
    Optimizer,
    Parameters,
    Path,
    Plain,
    Saved,
    Sequence,
    Tensor,
    Value,
)

_DEEPEST = 9


class Calls(Libraries):
    """Interpreter of calls."""

    def call(self, callee: Value, args: list[Value], keywords: dict[str, Value], node: ast.AST, state: State) -> Value:
        if isinstance(callee, Path):
            return self._call_path(callee.name, args, keywords, node, state)
        if isinstance(callee, Method):
            return self._call_method(callee, args, keywords, node, state)
        if isinstance(callee, Function):
            return self.run_function(callee, args, keywords, state)
        if isinstance(callee, Layer):
            return self.call_layer(callee, args + [v for k, v in keywords.items() if k == "input"], node, state)
        if isinstance(callee, Bag):
            return self.call_bag(callee, args, keywords, node, state)
        if isinstance(callee, ClassValue):
            return self.make_object(callee, args, keywords, node, state)
        if isinstance(callee, Object):
            name = "forward" if callee.kind.is_module and self.find_function(callee.kind, "forward") else "__call__"
            function = self.find_function(callee.kind, name)
            if function is not None:
                return self.run_function(function, args, keywords, state, callee)
            layer = state.heap.get((callee, "@layer"))
            if isinstance(layer, Layer):
                return self.call_layer(layer, args, node, state)
            return self.call_unknown(self._as_unknown(callee, state), args, node, state, "call")
        if isinstance(callee, Choice):
            return self._call_any(callee, args, keywords, node, state)
        if isinstance(callee, Tensor):
            return self.call_unknown(callee, [*args, *keywords.values()], node, state, callee.text or "call")
        return self.call_unknown(Plain(), [*args, *keywords.values()], node, state, "call")

    def _as_unknown(self, value: Object, state: State) -> Tensor:
        known = state.heap.get((value, "@unknown"))
        if isinstance(known, Tensor):
            return known
        made = self.fresh()
        state.heap[value, "@unknown"] = made
        return made

    def _call_any(
        self, callee: Choice, args: list[Value], keywords: dict[str, Value], node: ast.AST, state: State
    ) -> Value:
        """Call one of several callees: each in a state of its own."""
        able = [one for one in callee.values if not isinstance(one, Plain)]
        if len(able) == 1:
            return self.call(able[0], args, keywords, node, state)
        branches = state.branches
        left: State | None = None
        result: Value | None = None
        for index, one in enumerate(able):
            there = state.copy()
            there.branches = (*branches, (id(callee), index))
            value = self.call(one, args, keywords, node, there)
            sides = (branches if left is None else left.branches, there.branches)
            if len(sides[0]) == len(branches):
                sides = ((*branches, (id(callee), -1)), sides[1])
            result = value if result is None else self.merge(result, value, branches, sides)
            left = there if left is None else self.join(left, there, branches)
        if left is not None:
            left.branches = branches
            state.become(left)
        return Plain() if result is None else result

    # -- functions and objects of the file

    def run_function(
        self,
        function: Function,
        args: list[Value],
        keywords: dict[str, Value],
        state: State,
        me: Value | None = None,
    ) -> Value:
        node = function.node
        depth = sum(1 for frame in self.frames if frame.name == getattr(node, "name", "<lambda>"))
        if len(self.frames) > _DEEPEST or depth > 2:
            self.retained.handed_on()
            return self.fresh()
        frame = self._enter(function, me)
        before = state.grad
        self._bind(function, args, keywords, state, me)
        for decorator in getattr(node, "decorator_list", ()):
            switch = self.grad_switch(decorator, state)
            if switch is not None:
                state.grad = switch
        if state.grad and not state.quiet:
            self.functions_run.add(node)
        statement = self.statement
        try:
            if isinstance(node, ast.Lambda):
                return self.evaluate(node.body, state)
            end = self.block(node.body, state)
            return self._left(frame, end, state)
        finally:
            self.statement = statement
            self.frames.pop()
            state.grad = before

    def _enter(self, function: Function, me: Value | None) -> Frame:
        self.frame_count += 1
        number = self.frame_count
        name = getattr(function.node, "name", "<lambda>")
        frame = Frame(number, name, (number, *function.chain), function.owner, me)
        frame.is_root, self.next_is_root = self.next_is_root, False
        self.frames.append(frame)
        return frame

    def _left(self, frame: Frame, end: State | None, state: State) -> Value:
        """The result of a function: on the path analysed furthest, together with the state of that path."""
        if frame.yielded:
            made = Sequence("list")
            if end is None and frame.returned:
                end = frame.returned[-1][1]
            if end is not None:
                state.become(end)
            state.heap[made, "@items"] = tuple(frame.yielded[:8])
            return made
        if end is not None and not any(not isinstance(value, Plain) for value, _, _ in frame.returned):
            state.become(end)
            return Plain(None, True)
        if not frame.returned:
            return Plain(None, True)
        value, there, _ = frame.returned[-1]
        branches = state.branches
        state.become(there)
        state.branches = branches
        return value

    def _bind(
        self, function: Function, args: list[Value], keywords: dict[str, Value], state: State, me: Value | None
    ) -> None:
        node, frame = function.node, self.frames[-1]
        given = list(args)
        if me is not None and not _is_static(node):
            given.insert(0, me)
        positional = [*node.args.posonlyargs, *node.args.args]
        names = {one.arg for one in [*positional, *node.args.kwonlyargs]}
        defaults: dict[str, ast.expr] = dict(
            zip(
                [one.arg for one in positional[len(positional) - len(node.args.defaults) :]],
                node.args.defaults,
                strict=False,
            )
        )
        defaults |= {
            one.arg: default
            for one, default in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=False)
            if default is not None
        }
        bound: dict[str, Value] = {one.arg: value for one, value in zip(positional, given, strict=False)}
        bound.update({name: value for name, value in keywords.items() if name in names})
        for name in names:
            if name not in bound:
                default = defaults.get(name)
                bound[name] = self._default(default, state) if default is not None else self._given(name)
        if node.args.vararg is not None:
            rest = Sequence("tuple")
            if len(given) > len(positional) or args:
                state.heap[rest, "@items"] = tuple(given[len(positional) :])
            bound[node.args.vararg.arg] = rest
        if node.args.kwarg is not None:
            extra = Dictionary()
            state.heap[extra, "@entries"] = {name: one for name, one in keywords.items() if name not in names}
            bound[node.args.kwarg.arg] = extra
        for name, value in bound.items():
            state.names[frame.number, name] = value

    def _given(self, name: str) -> Tensor:
        made = self.fresh(text=name)
        self.given.add(made)
        return made

    def _default(self, node: ast.expr, state: State) -> Value:
        return self.evaluate(node, state)

    def grad_switch(self, node: ast.expr, state: State) -> bool | None:
        """The grad mode that a decorator or ``with`` sets, on or off; None for any other."""
        call = node if isinstance(node, ast.Call) else None
        target = call.func if call is not None else node
        name = target.attr if isinstance(target, ast.Attribute) else getattr(target, "id", "")
        if name in ("no_grad", "inference_mode"):
            if (
                call is not None
                and call.args
                and isinstance(call.args[0], ast.Constant)
                and call.args[0].value is False
            ):
                return None
            return False
        if name == "enable_grad":
            return True
        if name == "set_grad_enabled" and call is not None and call.args:
            known = self.constant(self.evaluate(call.args[0], state))
            return bool(known) if isinstance(known, bool) else True
        return None

    def make_object(
        self, kind: ClassValue, args: list[Value], keywords: dict[str, Value], node: ast.AST, state: State
    ) -> Value:
        """An instance of a class of the file."""
        made = Object(kind)
        for base in kind.bases:
            if isinstance(base, Path) and layer_operation(base.name.rpartition(".")[2]) is not None:
                layer = self.make_layer(base.name.rpartition(".")[2], [], {}, node, state)
                state.heap[made, "@layer"] = layer
                self.set_attribute(made, "own layer", layer, state)
        function = self.find_function(kind, "__init__")
        if function is not None:
            self.run_function(function, args, keywords, state, made)
        else:
            fields = [
                one for one in kind.node.body if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
            ]
            for field, value in zip(fields, args, strict=False):
                self.set_attribute(made, field.target.id, value, state)  # type: ignore[union-attr]
            for name, value in keywords.items():
                self.set_attribute(made, name, value, state)
        return made

    # -- methods

    def _call_method(
        self, method: Method, args: list[Value], keywords: dict[str, Value], node: ast.AST, state: State
    ) -> Value:
        owner, name = method.owner, method.name
        if method.function is not None:
            return self.run_function(method.function, args, keywords, state, owner)
        if isinstance(owner, Tensor):
            return self.tensor_method(owner, name, args, keywords, node, state)
        if isinstance(owner, Optimizer):
            return self.optimizer_method(owner, name, args, node, state)
        if isinstance(owner, Layer | Bag | Object):
            return self._method_of_module(owner, name, args, keywords, node, state)
        if isinstance(owner, Sequence | Dictionary | Parameters):
            return self._container_method(owner, name, args, state)
        if isinstance(owner, ClassValue) and name == "apply":
            return self._custom_function(owner, args, node, state)
        if isinstance(owner, Plain):
            return Plain() if not self._any_tensor(args, state) else self.fresh()
        return self.call_unknown(Plain(), [*args, *keywords.values()], node, state, name)

    def _method_of_module(
        self,
        owner: Layer | Bag | Object,
        name: str,
        args: list[Value],
        keywords: dict[str, Value],
        node: ast.AST,
        state: State,
    ) -> Value:
        if name in ("manual_backward", "backward") and args:
            self.run_backward(args[0], keywords, args[2:], node, state)
            return Plain(None, True)
        if name == "forward" and not isinstance(owner, Object):
            return self.call(owner, args, keywords, node, state)
        if name == "optimizers" and isinstance(owner, Object):
            function = self.find_function(owner.kind, "configure_optimizers")
            if function is not None:
                known = state.heap.get((owner, "@configured"))
                if known is None:
                    known = self.run_function(function, [], {}, state, owner)
                    state.heap[owner, "@configured"] = known
                return known  # type: ignore[return-value]
        found = self.module_method(owner, name, args, keywords, node, state)
        if found is not None:
            return found
        return self.call_unknown(Plain(), [*args, *keywords.values()], node, state, name)

    def _custom_function(self, kind: ClassValue, args: list[Value], node: ast.AST, state: State) -> Value:
        """Interpret ``Function.apply``, which saves the inputs that ``save_for_backward`` names."""
        made = self.apply("none", args, node, state, kind.node.name)
        forward = kind.functions.get("forward")
        if forward is None or made.node is None:
            return made
        names = [one.arg for one in forward.node.args.args][1:]
        kept: set[str] = set()
        for call in ast.walk(forward.node):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
                if call.func.attr == "save_for_backward":
                    kept |= {one.id for one in call.args if isinstance(one, ast.Name)}
                elif call.func.attr in ("mark_dirty", "mark_non_differentiable", "set_materialize_grads"):
                    return self.fresh(grad=MAYBE)
        stored = {
            one.id for one in ast.walk(forward.node) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)
        }
        saved = []
        for name, value in zip(names, args, strict=False):
            tensor = self.tensor_of(value)
            if name in kept - stored and tensor is not None:
                need = self.graph_of(tensor, state)[1]
                saved.append(
                    Saved(tensor.memories, made.clock, name, max(need, made.grad), state.branches, False, tensor.text)
                )
        made.node = Node(kind.node.name, made.node.parents, tuple(saved), made.node.site, made.clock, made.grad)
        return made

    # -- functions of libraries


def _is_static(node: ast.AST) -> bool:
    return any(getattr(one, "id", "") == "staticmethod" for one in getattr(node, "decorator_list", ()))
