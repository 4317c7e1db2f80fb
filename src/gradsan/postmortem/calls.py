"""Calls in the post-mortem analysis, followed into functions and modules with available source."""

from __future__ import annotations

import ast
import contextlib
import functools
import types
from typing import Any

import torch
from torch import nn

from gradsan import _torch
from gradsan.postmortem import lookup
from gradsan.postmortem.functions import (
    arguments_of,
    chained,
    closed_over,
    decorator_switch,
    definition_at,
    given_by_hooks,
    is_chain,
    is_readable,
    is_user_function,
    last_name,
    returned_by_hooks,
)
from gradsan.postmortem.lookup import (
    UNKNOWN,
    Bound,
    Closure,
    Namespace,
    TensorMethod,
    Value,
    joined,
    made,
    memory_in,
    of_thing,
)
from gradsan.postmortem.named_calls import PASSING, NamedCalls
from gradsan.record.stacks import file_of, is_user_file, qualified_name
from gradsan.source.tree import read_source

_DEEPEST = 24
_PARAMETER_ITERATORS = frozenset({"parameters", "named_parameters", "buffers", "named_buffers", "state_dict"})
_MODULE_ITERATORS = frozenset({"modules", "children", "named_modules", "named_children"})
_LISTING = PASSING | {"zip", "enumerate", "range", "sum", "max", "min", "map", "filter"}
_WRAPPING = frozenset({"compile", "grad", "grad_and_value", "jacfwd", "jacrev", "vmap"})
_SAME_OBJECT = frozenset(
    {"train", "eval", "to", "cuda", "cpu", "float", "double", "half", "requires_grad_", "share_memory"}
)


class Calls(NamedCalls):
    """Interpreter of calls."""

    def call(self, node: ast.Call, space: Namespace) -> Value:
        """The result of a call."""
        bound, self.bound = self.bound, ()
        function = self.value(node.func, space)
        args = [value for one in node.args for value in self._given(one, space)]
        keywords = {one.arg: self.value(one.value, space) for one in node.keywords if one.arg is not None}
        self.bound = bound
        return self.called(function, args, keywords, node, space)

    def _given(self, node: ast.expr, space: Namespace) -> list[Value]:
        value = self.value(node, space)
        if not isinstance(node, ast.Starred):
            return [value]
        if isinstance(value.thing, list | tuple):
            return [of_thing(one) for one in value.thing]
        return [value] if value.items is None else list(value.items)

    def called(
        self, function: Value, args: list[Value], keywords: dict[str, Value], node: ast.expr, space: Namespace
    ) -> Value:
        """The result of calling ``function``, once its events are in the script."""
        thing = function.thing
        if isinstance(thing, Closure):
            return self._run_closure(thing, args, keywords, node, space)
        if isinstance(thing, Bound):
            return self._method(thing, args, keywords, node, space)
        if isinstance(thing, TensorMethod):
            return self._tensor_method(thing, args, keywords, node, space)
        if isinstance(thing, functools.partial):
            before = [of_thing(one) for one in thing.args]
            named = {key: of_thing(one) for key, one in thing.keywords.items()}
            return self.called(of_thing(thing.func), [*before, *args], {**named, **keywords}, node, space)
        if isinstance(thing, types.MethodType):
            return self.called(Value(Bound(thing.__func__, of_thing(thing.__self__))), args, keywords, node, space)
        if isinstance(thing, nn.Module):
            return self._module(function, args, keywords, node, space)
        if function.kind is not None and isinstance(function.kind, type) and not function.is_known:
            return self._object_called(function, args, keywords, node, space)
        if isinstance(thing, type):
            return self._constructed(thing, args, keywords, node, space)
        if isinstance(thing, types.FunctionType):
            return self._function(thing, args, keywords, node, space)
        if callable(thing):
            inner = lookup.attribute(function, "__call__")
            if isinstance(inner.thing, Bound) and isinstance(inner.thing.function, types.FunctionType):
                return self.called(inner, args, keywords, node, space)
        name = getattr(thing, "__name__", last_name(node))
        if getattr(thing, "__module__", None) == "builtins" and name not in _LISTING:
            return self._of_python(name, args)
        return self._builtin(name, args, keywords, node, space)

    def _function(
        self,
        function: types.FunctionType,
        args: list[Value],
        keywords: dict[str, Value],
        node: ast.expr,
        space: Namespace,
    ) -> Value:
        name = function.__name__
        if name == "checkpoint" and args:
            return self.called(args[0], args[1:], {}, node, space)
        is_torchs = (function.__module__ or "").partition(".")[0] == "torch"
        if is_torchs and name in _WRAPPING and args and not args[0].may_be_tensor:
            return args[0]
        if is_torchs and name == "functional_call" and len(args) > 2:
            given = args[2]
            return self.called(args[0], [given] if given.items is None else given.items, {}, node, space)
        switched = self.records
        chain: list[Any] = [function]
        while hasattr(chain[-1], "__wrapped__"):
            chain.append(chain[-1].__wrapped__)
        if len(chain) > 1 and name == getattr(chain[-1], "__name__", name):
            switch = decorator_switch(chain[-1])
            self.records = self.records if switch is None else switch
        # A decorator of the program's own runs around the function; torch's wrappers are skipped.
        inner = next((one for one in chain if is_user_function(one)), chain[-1])
        result = self._run_function(inner, args, keywords, node, space)
        if inner is not function and file_of(function.__code__) == contextlib.__file__ and result.items:
            result = result.items[0]
        self.records = switched
        return result

    def _run_function(
        self, function: Any, args: list[Value], keywords: dict[str, Value], node: ast.expr, space: Namespace
    ) -> Value:
        code = getattr(function, "__code__", None)
        name = getattr(function, "__name__", "?")
        if code is None or len(self.frames) >= _DEEPEST or not is_readable(function):
            return self._builtin(name, args, keywords, node, space)
        file = file_of(code)
        source = read_source(file)
        definition = None if source is None else definition_at(source, code.co_firstlineno, code.co_name)
        if definition is None:
            return self._builtin(name, args, keywords, node, space)
        names = arguments_of(definition, args, keywords, function)
        cells = closed_over(function)
        module = self.module_of(function.__globals__, file)
        inner = Namespace(file, qualified_name(code), names, {}, None, module)
        inner.outer = Namespace(file, "", cells, {}, None, module) if cells else None
        return self._run(definition, inner, node, space)

    def _run_closure(
        self, closure: Closure, args: list[Value], keywords: dict[str, Value], node: ast.expr, space: Namespace
    ) -> Value:
        if len(self.frames) >= _DEEPEST:
            return made()
        outer: Namespace = closure.scope
        names = arguments_of(closure.node, args, keywords, None)
        inner = Namespace(outer.file, closure.qualname, names, {}, outer, outer.module)
        switched = self.records
        for decorator in getattr(closure.node, "decorator_list", ()):
            switch = self.grad_switch(decorator)
            self.records = self.records if switch is None else switch
        result = self._run(closure.node, inner, node, space)
        self.records = switched
        return result

    def _run(self, definition: Any, inner: Namespace, node: ast.expr, space: Namespace) -> Value:
        frames, statement, bound, yielded = self.frames, self.statement, self.bound, self.yielded
        if any(frame.function == inner.qualname and frame.file == inner.file for frame in frames[-8:]):
            return made()  # a recursion adds nothing new
        self.frames, self.bound, self.yielded = (*frames, self.frame_at(node, space)), (), []
        live = self.live_frames.get((inner.file, inner.qualname))
        if live is not None:
            self._spaces[inner.file, inner.qualname] = inner
            inner.live = live
            inner.names = {
                name: lookup.live_instead(live.get(name, UNKNOWN), value) for name, value in inner.names.items()
            }
        if isinstance(definition, ast.Lambda):
            returned = [self.value(definition.body, inner)]
        else:
            returned = self.block(definition.body, inner)
        if self.yielded:
            returned = [Value(items=self.yielded)]
        self.frames, self.statement, self.bound, self.yielded = frames, statement, bound, yielded
        return joined(returned) if returned else Value(None)

    def _method(
        self, method: Bound, args: list[Value], keywords: dict[str, Value], node: ast.expr, space: Namespace
    ) -> Value:
        owner, function = method.owner, method.function
        name = getattr(function, "__name__", "?")
        if isinstance(function, property):
            return Value()
        thing = owner.thing
        if name == "step" and self._is_optimizer(owner):
            return self._step(owner, args, node, space)
        given = next((one for one in args if self._is_optimizer(one)), None)
        if name == "step" and given is not None and not is_user_function(function):
            # GradScaler and its like step their optimizer argument.
            return self._step(given, [], node, space)
        if not owner.is_known and name in _PARAMETER_ITERATORS and owner.attributes is not None:
            whole = lookup.any_of(list(owner.attributes.values()))
            return Value(items=[Value(items=[Value(""), whole]) if name.startswith("named") else whole])
        if isinstance(thing, nn.Module) and not is_user_function(function):
            if name in _PARAMETER_ITERATORS:
                tensors = list(thing.buffers() if "buffer" in name else thing.parameters())
                tensors += list(thing.buffers()) if name == "state_dict" else []
                whole = _all_of(tensors)
                return Value(items=[Value(items=[Value(""), whole]) if name.startswith("named") else whole])
            if name in _MODULE_ITERATORS:
                found = list(thing.modules() if "modules" in name else thing.children())[:12]
                values = [of_thing(one) for one in found]
                return Value(items=[Value(items=[Value(""), one]) for one in values] if "named" in name else values)
            if name in _SAME_OBJECT:
                return owner
        if isinstance(thing, type) and issubclass(thing, torch.autograd.Function) and name == "apply":
            result = made()
            self.note("op", thing.__name__, node, space, operands=args, result=result)
            return result
        return self.called(of_thing(function), [owner, *args], keywords, node, space)

    def _module(
        self, function: Value, args: list[Value], keywords: dict[str, Value], node: ast.expr, space: Namespace
    ) -> Value:
        thing: Any = function.thing
        inner = _torch.wrapped_module(thing)
        if inner is not None:
            return self.called(of_thing(inner), args, keywords, node, space)
        args = given_by_hooks(self, function, args, node, space)
        if is_chain(thing):
            result = chained(self, thing, args, node, space)
        else:
            result = self.called(Value(Bound(type(thing).forward, function)), args, keywords, node, space)
        return returned_by_hooks(self, function, args, result, node, space)

    def _object_called(
        self, function: Value, args: list[Value], keywords: dict[str, Value], node: ast.expr, space: Namespace
    ) -> Value:
        is_module = issubclass(function.kind, nn.Module)
        method = lookup.attribute(function, "forward" if is_module else "__call__")
        return self.called(method, args, keywords, node, space) if isinstance(method.thing, Bound) else made()

    def _constructed(
        self, kind: Any, args: list[Value], keywords: dict[str, Value], node: ast.expr, space: Namespace
    ) -> Value:
        if kind.__module__ == "builtins":
            listing = kind.__name__ in _LISTING
            return self._builtin(kind.__name__, args, keywords, node, space) if listing else Value()
        made_object = self._kept_in(space, kind) or Value(attributes={}, kind=kind)
        if issubclass(kind, torch.optim.Optimizer) and args:
            made_object.attributes = {"params": Value(memory=memory_in(args[0]))}
        start = vars(kind).get("__init__")
        if isinstance(start, types.FunctionType) and is_user_file(start.__code__.co_filename):
            self.called(of_thing(start), [made_object, *args], keywords, node, space)
        return made_object

    def _kept_in(self, space: Namespace, kind: Any) -> Value | None:
        """The live object of class ``kind`` in the variable that the current statement assigns, if there is one."""
        kept = [live for name in self.bound if type(live := space.live.get(name, UNKNOWN)) is kind]
        return of_thing(kept[0]) if len({id(live) for live in kept}) == 1 else None

    def grad_switch(self, node: ast.expr) -> bool | None:
        """The grad mode that a context manager or decorator sets, on or off; None for another."""
        call = node.func if isinstance(node, ast.Call) else node
        name = call.attr if isinstance(call, ast.Attribute) else call.id if isinstance(call, ast.Name) else ""
        if name in ("no_grad", "inference_mode"):
            return False
        return True if name == "enable_grad" else None

    def defined(self, node: ast.FunctionDef | ast.AsyncFunctionDef, space: Namespace) -> Value:
        """The function that a ``def`` makes."""
        if space.live.get(node.name) is not None and space.outer is None and space.qualname == "<module>":
            return of_thing(space.live[node.name])
        prefix = "" if space.qualname == "<module>" else f"{space.qualname}.<locals>."
        return Value(Closure(node, space, f"{prefix}{node.name}"))

    def module_of(self, variables: dict[str, Any], file: str) -> Namespace:
        """The namespace of the module with these global variables."""
        known = self.modules.get(id(variables))
        if known is None:
            known = self.modules[id(variables)] = Namespace(file, "<module>", {}, variables)
        return known

    def spaces_with_frames(self) -> list[Namespace]:
        """The namespaces last analysed of the functions and modules whose variables are alive."""
        return [*self.modules.values(), *self._spaces.values()]


def _all_of(tensors: list[Any]) -> Value:
    """One value for all of several live tensors."""
    memory = frozenset().union(*(of_thing(one).memory for one in tensors)) if tensors else frozenset()
    return Value(memory=memory)
