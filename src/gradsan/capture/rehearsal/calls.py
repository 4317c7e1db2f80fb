"""Following calls: into functions and modules whose source is there; of what has none, by the name it has in torch."""

from __future__ import annotations

import ast
import functools
import sys
import types
from typing import Any

import torch
from torch import nn

from gradsan.capture import _torch
from gradsan.capture.rehearsal import lookup
from gradsan.capture.rehearsal.script import Event, EventKind, Script
from gradsan.capture.rehearsal.values import (
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
from gradsan.capture.stacks import file_of, is_user_file
from gradsan.model import Frame
from gradsan.source.inplace import ALIASING_METHODS, PIECES, is_inplace_name
from gradsan.source.tree import SourceFile, read_source

_DEEPEST = 24
_PARAMETER_ITERATORS = frozenset({"parameters", "named_parameters", "buffers", "named_buffers", "state_dict"})
_MODULE_ITERATORS = frozenset({"modules", "children", "named_modules", "named_children"})
_PASSING = frozenset({"list", "tuple", "reversed", "sorted", "iter", "set", "tqdm", "trange", "next", "deepcopy"})
_LISTING = _PASSING | {"zip", "enumerate", "range", "sum", "max", "min", "map", "filter"}
_ADDING = frozenset({"append", "appendleft", "extend", "insert", "add", "push"})
_SAME_OBJECT = frozenset(
    {"train", "eval", "to", "cuda", "cpu", "float", "double", "half", "requires_grad_", "share_memory"}
)
_NOT_READ = frozenset({"IPython", "ipykernel", "_pytest", "pluggy", "pytest", "numpy", "gradsan", "tqdm"})
_EXPANDING = frozenset({"expand", "expand_as", "broadcast_to"})
_SILENT = frozenset({"item", "tolist", "numel", "size", "dim", "stride", "data_ptr", "is_contiguous", "zero_grad"})


class Calls:
    """Reads calls, and keeps where reading stands."""

    def __init__(self, script: Script) -> None:
        """Begin an empty reading into ``script``."""
        self.script = script
        self.frames: tuple[Frame, ...] = ()
        self.bound: tuple[str, ...] = ()
        self.records = True
        self.statement: ast.stmt | None = None
        self.statements_read = 0
        self.fields: dict[int, dict[str, Value]] = {}
        self.modules: dict[int, Namespace] = {}
        self.expanded: frozenset[int] = frozenset()
        self._spaces: dict[tuple[str, str], Namespace] = {}

    # ---- what happens

    def note(
        self,
        kind: EventKind,
        name: str,
        node: ast.expr | ast.stmt,
        space: Namespace,
        *,
        operands: list[Value],
        result: Value | None = None,
        written: Value | None = None,
        frame: Frame | None = None,
        retain_graph: bool = False,
    ) -> None:
        """Put one event at ``node`` into the script; ``frame`` is a library's frame below it."""
        leaves = frozenset(memory for one in operands for memory in _leaves_in(one.thing))
        frames = (*self.frames, self.frame_at(node, space), *(() if frame is None else (frame,)))
        self.script.add(
            Event(
                kind,
                frames,
                name,
                tuple(memory_in(one) for one in operands),
                frozenset() if result is None else result.memory,
                frozenset() if written is None else written.memory,
                leaves,
                self.bound,
                self.records,
                retain_graph,
                written is not None and bool(written.memory & self.expanded),
            )
        )

    def frame_at(self, node: ast.AST, space: Namespace) -> Frame:
        """The frame of a function that stands at ``node``."""
        source = read_source(space.file)
        is_user = is_user_file(space.file)
        if source is None or not is_user:
            return Frame(space.file, getattr(node, "lineno", 1), space.qualname, is_user=is_user)
        span = source.span(node)
        return Frame(space.file, span.line, space.qualname, span.column, span.end_line, span.end_column, is_user)

    # ---- calls

    def call(self, node: ast.Call, space: Namespace) -> Value:
        """What a call gives back."""
        bound, self.bound = self.bound, ()
        function = self.value(node.func, space)
        args = [self.value(one, space) for one in node.args]
        if len(args) == 1 and isinstance(node.args[0], ast.Starred) and args[0].items is not None:
            args = list(args[0].items)
        keywords = {one.arg: self.value(one.value, space) for one in node.keywords if one.arg is not None}
        self.bound = bound
        return self.called(function, args, keywords, node, space)

    def called(
        self, function: Value, args: list[Value], keywords: dict[str, Value], node: ast.expr, space: Namespace
    ) -> Value:
        """What calling ``function`` gives back, once all that it does is in the script."""
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
        name = getattr(thing, "__name__", _last_name(node))
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
        switched = self.records
        inner: Any = function
        while hasattr(inner, "__wrapped__"):
            inner = inner.__wrapped__
        if inner is not function and name == getattr(inner, "__name__", name):
            switch = _decorator_switch(inner)
            self.records = self.records if switch is None else switch
        result = self._run_function(inner, args, keywords, node, space)
        self.records = switched
        return result

    def _run_function(
        self, function: Any, args: list[Value], keywords: dict[str, Value], node: ast.expr, space: Namespace
    ) -> Value:
        code = getattr(function, "__code__", None)
        name = getattr(function, "__name__", "?")
        if code is None or len(self.frames) >= _DEEPEST or not _is_readable(function):
            return self._builtin(name, args, keywords, node, space)
        file = file_of(code)
        source = read_source(file)
        definition = None if source is None else definition_at(source, code.co_firstlineno, code.co_name)
        if definition is None:
            return self._builtin(name, args, keywords, node, space)
        names = _arguments(definition, args, keywords, function)
        cells = _closed_over(function)
        module = self.module_of(function.__globals__, file)
        inner = Namespace(file, getattr(code, "co_qualname", code.co_name), names, {}, None, module)
        inner.outer = Namespace(file, "", cells, {}, None, module) if cells else None
        return self._run(definition, inner, node, space)

    def _run_closure(
        self, closure: Closure, args: list[Value], keywords: dict[str, Value], node: ast.expr, space: Namespace
    ) -> Value:
        if len(self.frames) >= _DEEPEST:
            return made()
        outer: Namespace = closure.scope
        names = _arguments(closure.node, args, keywords, None)
        inner = Namespace(outer.file, closure.qualname, names, {}, outer, outer.module)
        switched = self.records
        for decorator in getattr(closure.node, "decorator_list", ()):
            switch = self.grad_switch(decorator)
            self.records = self.records if switch is None else switch
        result = self._run(closure.node, inner, node, space)
        self.records = switched
        return result

    def _run(self, definition: Any, inner: Namespace, node: ast.expr, space: Namespace) -> Value:
        frames, statement, bound = self.frames, self.statement, self.bound
        if any(frame.function == inner.qualname and frame.file == inner.file for frame in frames[-8:]):
            return made()  # a recursion tells nothing new
        self.frames, self.bound = (*frames, self.frame_at(node, space)), ()
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
        self.frames, self.statement, self.bound = frames, statement, bound
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
        if not owner.is_known and name in _PARAMETER_ITERATORS and owner.attributes is not None:
            whole = lookup.any_of(list(owner.attributes.values()))
            return Value(items=[Value(items=[Value(""), whole]) if name.startswith("named") else whole])
        if isinstance(thing, nn.Module) and not _is_user_function(function):
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

    def _is_optimizer(self, value: Value) -> bool:
        kind = value.kind if not value.is_known else type(value.thing)
        return isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)

    def _step(self, optimizer: Value, args: list[Value], node: ast.expr, space: Namespace) -> Value:
        """A step: it writes all parameters of the optimizer, and runs its closure before and after."""
        if optimizer.is_known:
            name, written = type(optimizer.thing).__name__, Value(memory=lookup.memory_in_groups(optimizer.thing))
        else:
            name, written = optimizer.kind.__name__, (optimizer.attributes or {}).get("params", Value())
        closures = [one for one in args if isinstance(one.thing, Closure | types.FunctionType)]
        for closure in closures:
            self.called(closure, [], {}, node, space)
        self.note("step", name, node, space, operands=[], written=written)
        for closure in closures:
            self.called(closure, [], {}, node, space)
        return Value()

    def _module(
        self, function: Value, args: list[Value], keywords: dict[str, Value], node: ast.expr, space: Namespace
    ) -> Value:
        thing: Any = function.thing
        inner = _torch.wrapped_module(thing)
        if inner is not None:
            return self.called(of_thing(inner), args, keywords, node, space)
        if isinstance(thing, nn.Sequential):
            result = args[0] if args else made()
            for child in thing.children():
                result = self.called(of_thing(child), [result], {}, node, space)
            return result
        return self.called(Value(Bound(type(thing).forward, function)), args, keywords, node, space)

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
        """The live object of class ``kind`` in the variable that the present statement assigns."""
        for name in self.bound:
            live = space.live.get(name, UNKNOWN)
            if type(live) is kind:
                return of_thing(live)
        return None

    def _tensor_method(
        self, method: TensorMethod, args: list[Value], keywords: dict[str, Value], node: ast.expr, space: Namespace
    ) -> Value:
        owner, name = method.owner, method.name
        if owner.items is not None or isinstance(owner.thing, list | dict | set):
            return self._container_method(owner, name, args)
        if name == "backward":
            retain = keywords.get("retain_graph")
            kept = retain is not None and not (retain.is_known and not retain.thing)
            self.note("backward", "backward", node, space, operands=[owner], retain_graph=kept)
            return Value(None)
        if name == "step" and any(self._is_optimizer(one) for one in args):
            return self._step(next(one for one in args if self._is_optimizer(one)), [], node, space)
        if not owner.may_be_tensor:
            return Value()
        return self._builtin(name, [owner, *args], keywords, node, space)

    def _container_method(self, owner: Value, name: str, args: list[Value]) -> Value:
        if name in _ADDING and owner.items is not None and args:
            owner.items.extend(args[-1].items or args[-1:] if name == "extend" else args[-1:])
            return Value(None)
        if name in ("items", "values", "keys", "get", "pop", "popleft", "copy", "setdefault"):
            if owner.items is not None:
                values = owner.items
            else:
                inner = owner.thing.values() if isinstance(owner.thing, dict) else owner.thing
                values = [of_thing(one) for one in list(inner)[:64]]
            if name == "items":
                return Value(items=[Value(items=[Value(), one]) for one in values[:12]])
            return Value(items=values) if name in ("values", "copy") else lookup.any_of(values)
        return Value()

    def _builtin(
        self, name: str, args: list[Value], keywords: dict[str, Value], node: ast.expr, space: Namespace
    ) -> Value:
        """A call of what has no source: by what its name says."""
        if name in _SILENT:
            return Value()
        if name in ("zip", "enumerate"):
            return self._zipped(name, args)
        if name == "range":
            return Value(items=[Value(), Value()])
        if name in _PASSING and args:
            return args[0]
        if name == "backward" and args:
            self.note("backward", "backward", node, space, operands=args[:1])
            return Value(None)
        if name == "detach" and args:
            return Value(memory=args[0].memory)
        out = keywords.get("out")
        operands = [*args, *keywords.values()]
        if out is not None and not (out.is_known and out.thing is None):
            self.note("write", name, node, space, operands=operands, result=out, written=out)
            return out
        if is_inplace_name(name) and args:
            self.note("write", name, node, space, operands=operands, result=args[0], written=args[0])
            return args[0]
        if name in _EXPANDING and args:
            result = Value(memory=args[0].memory | made().memory)
            self.expanded |= result.memory - args[0].memory
        elif name in ALIASING_METHODS and args:
            result = Value(memory=args[0].memory)
        elif name in PIECES and args:
            result = Value(items=[Value(memory=args[0].memory) for _ in range(_pieces(args))])
        else:
            result = made()
        if name == "clone" or any(one.may_be_tensor or one.items is not None for one in operands):
            self.note("op", name, node, space, operands=operands, result=result)
        return result

    def _of_python(self, name: str, args: list[Value]) -> Value:
        if name == "getattr" and len(args) > 1 and isinstance(args[1].thing, str):
            return lookup.attribute(args[0], args[1].thing)
        return Value()

    def _zipped(self, name: str, args: list[Value]) -> Value:
        columns = [self.iterated(one) for one in args]
        length = min(map(len, columns), default=0)
        if name == "enumerate":
            return Value(items=[Value(items=[Value(), one]) for one in columns[0]] if columns else [])
        return Value(items=[Value(items=[column[row] for column in columns]) for row in range(length)])

    def grad_switch(self, node: ast.expr) -> bool | None:
        """Whether a context manager or decorator switches recording on or off; None for another."""
        call = node.func if isinstance(node, ast.Call) else node
        name = call.attr if isinstance(call, ast.Attribute) else call.id if isinstance(call, ast.Name) else ""
        if name in ("no_grad", "inference_mode"):
            return False
        return True if name == "enable_grad" else None

    def defined(self, node: ast.FunctionDef | ast.AsyncFunctionDef, space: Namespace) -> Value:
        """A function that a ``def`` makes."""
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
        """The namespaces that were read last of the functions and modules whose variables are alive."""
        return [*self.modules.values(), *self._spaces.values()]

    # ---- given by the classes that build on this one

    live_frames: dict[tuple[str, str], dict[str, Any]]

    def value(self, node: ast.expr, space: Namespace) -> Value:
        """See :class:`Expressions`."""
        raise NotImplementedError

    def iterated(self, value: Value) -> list[Value]:
        """See :class:`Expressions`."""
        raise NotImplementedError

    def block(self, body: Any, space: Namespace) -> list[Value]:
        """See :class:`Walk`."""
        raise NotImplementedError


def _leaves_in(thing: Any) -> frozenset[int]:
    """The storages of a parameter, or of the parameters in a list."""
    if torch.is_tensor(thing):
        return of_thing(thing).memory if thing.is_leaf and thing.requires_grad else frozenset()
    if isinstance(thing, list | tuple):
        return frozenset(memory for one in thing if torch.is_tensor(one) for memory in _leaves_in(one))
    return frozenset()


def _all_of(tensors: list[Any]) -> Value:
    """One value for all of several live tensors."""
    memory = frozenset().union(*(of_thing(one).memory for one in tensors)) if tensors else frozenset()
    return Value(memory=memory)


def _last_name(node: ast.expr) -> str:
    function = node.func if isinstance(node, ast.Call) else node
    return (
        function.attr if isinstance(function, ast.Attribute) else function.id if isinstance(function, ast.Name) else "?"
    )


def _pieces(args: list[Value]) -> int:
    counts = [one.thing for one in args[1:] if one.is_known and isinstance(one.thing, int)]
    return min(max(counts[0], 1), 16) if counts else 4


def _is_user_function(function: Any) -> bool:
    code = getattr(function, "__code__", None)
    return code is not None and is_user_file(code.co_filename)


def _is_readable(function: Any) -> bool:
    """Whether a function's source is worth following: the user's, and that of the layers of torch and its libraries."""
    module = getattr(function, "__module__", "") or ""
    if _is_user_function(function):
        return True
    head = module.partition(".")[0]
    if head == "torch":
        is_layer = module.startswith(("torch.nn.modules", "torch.nn.functional"))
        return is_layer and module != "torch.nn.modules.module"
    return head not in sys.stdlib_module_names and head not in _NOT_READ


@functools.lru_cache(maxsize=2048)
def definition_at(source: SourceFile, line: int, name: str) -> Any:
    """The function with its first line (that of a decorator counts) at ``line``, None where there is none."""
    kinds = (ast.Lambda,) if name == "<lambda>" else (ast.FunctionDef, ast.AsyncFunctionDef)
    for node in source.parents:
        if isinstance(node, kinds):
            first = min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", ()))])
            if first == line and getattr(node, "name", name) == name:
                return node
    return None


def _decorator_switch(function: Any) -> bool | None:
    source = read_source(function.__code__.co_filename) if hasattr(function, "__code__") else None
    node = (
        None if source is None else definition_at(source, function.__code__.co_firstlineno, function.__code__.co_name)
    )
    for decorator in getattr(node, "decorator_list", ()):
        call = decorator.func if isinstance(decorator, ast.Call) else decorator
        name = call.attr if isinstance(call, ast.Attribute) else getattr(call, "id", "")
        if name in ("no_grad", "inference_mode"):
            return False
    return None


def _closed_over(function: Any) -> dict[str, Value]:
    found: dict[str, Value] = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        try:
            found[name] = of_thing(cell.cell_contents)
        except ValueError:
            continue
    return found


def _arguments(node: Any, args: list[Value], keywords: dict[str, Value], function: Any) -> dict[str, Value]:
    """The parameters of a function with what a call gives them; else their defaults, where these are known."""
    positional = [one.arg for one in [*node.args.posonlyargs, *node.args.args]]
    names: dict[str, Value] = {}
    defaults = getattr(function, "__defaults__", None) or ()
    for name, default in zip(positional[len(positional) - len(defaults) :], defaults, strict=False):
        names[name] = of_thing(default)
    for name, default in (getattr(function, "__kwdefaults__", None) or {}).items():
        names[name] = of_thing(default)
    names.update(zip(positional, args, strict=False))
    if node.args.vararg is not None:
        names[node.args.vararg.arg] = Value(items=args[len(positional) :])
    known = {*positional, *(one.arg for one in node.args.kwonlyargs)}
    names.update({name: value for name, value in keywords.items() if name in known})
    if node.args.kwarg is not None:
        rest = {name: value for name, value in keywords.items() if name not in known}
        names[node.args.kwarg.arg] = Value(items=list(rest.values()), kind=list(rest))
    for name in known:
        names.setdefault(name, Value())
    return names
