"""Values that a function reads beside its arguments, and state that it only updates.

Only names that the bytecode reads are followed (``bytecode.py``); no code of the program is run. A value that is used
as a whole includes its contents: containers, parameters and buffers of a module, the attributes that its forward
reads. Names that the code itself binds are left out: a counter that a forward increases is no change from outside.

Values that are only updated have no part in the function's result, as far as its source shows: each statement with
the name changes that very value, and does nothing else with it.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import nn

from gradsan import _torch
from gradsan._imports import stored_in
from gradsan.graph.bytecode import ASKS_FOR_SHAPE, functions_of, getattr_static, reads_of, reads_of_method
from gradsan.graph.live import own_attribute
from gradsan.record.stacks import is_user_file

MOST_THINGS = 2_000
_ITEMS, _DEEPEST = 64, 4
PLAIN = (bool, int, float, complex, str, type(None))
"""Types whose values are compared by equality."""
_NOT_FOLLOWED = (type, types.BuiltinFunctionType, torch.dtype, torch.device, torch.Generator, torch.optim.Optimizer)
_MODULE_INTERNALS = frozenset(vars(nn.Module()))


class TooMuchError(Exception):
    """A function reads more values than can be noted."""


def reached(function: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that ``function`` reads, by expression: tensors, plain values, modules, functions, objects.

    ``arguments`` are those to follow, by name. Raises :class:`TooMuchError` beyond ``MOST_THINGS``.
    """
    search = _Search()
    search.callable("", function, 0)
    for name, value in arguments.items():
        search.whole(name, value, 0)
    return search.things


def parameter_names(function: Any) -> tuple[str, ...]:
    """The names of the positional parameters of ``function`` without ``self``; empty if it is no Python function."""
    if isinstance(function, functools.partial):
        return parameter_names(function.func)[len(function.args) :]
    if isinstance(function, nn.Module):
        function = getattr_static(type(function), "forward")
        bound = 1
    else:
        bound = 1 if isinstance(function, types.MethodType) else 0
        function = getattr(function, "__func__", function)
    code = getattr(function, "__code__", None)
    return () if code is None else code.co_varnames[bound : code.co_argcount]


class _Search:
    def __init__(self) -> None:
        self.things: dict[str, Any] = {}
        self._known: set[int] = set()

    def callable(self, path: str, value: Any, depth: int) -> None:
        """Add the values that a call of ``value`` reads."""
        if isinstance(value, functools.partial):
            self.callable(path, value.func, depth)
            for position, item in enumerate(value.args):
                self.whole(f"{path}args[{position}]", item, depth + 1)
            for name, item in value.keywords.items():
                self.whole(name, item, depth + 1)
        elif isinstance(value, nn.Module):
            self._module(type(value).__name__, value, depth)
        elif isinstance(value, types.MethodType):
            owner, function = value.__self__, value.__func__
            if isinstance(function, types.FunctionType):
                if isinstance(owner, nn.Module) and function.__name__ in (
                    "__call__",
                    "_call_impl",
                    "_wrapped_call_impl",
                ):
                    self._module(type(owner).__name__, owner, depth)
                else:
                    self._function(function, depth, owner)
        elif isinstance(value, types.FunctionType):
            self._function(value, depth)
        elif (method := getattr_static(type(value), "__call__")) is not None:
            for function in functions_of(method):
                self._function(function, depth, value)

    def whole(self, path: str, value: Any, depth: int) -> None:
        """Add a variable or element that the code uses as a whole."""
        if torch.is_tensor(value) or isinstance(value, PLAIN):
            self._add(path, value)
        elif depth > _DEEPEST or isinstance(value, _NOT_FOLLOWED):
            return
        elif isinstance(value, (list, tuple, deque, dict)):
            items = value.items() if isinstance(value, dict) else enumerate(value)
            for key, item in list(items)[:_ITEMS]:
                self.whole(f"{path}[{key!r}]", item, depth + 1)
        elif isinstance(value, nn.Module):
            self._add(path, value)
            self._module(path, value, depth)
        elif isinstance(value, (types.FunctionType, types.MethodType, functools.partial)):
            if not isinstance(value, types.MethodType):
                self._add(path, value)
            if id(value) not in self._known:
                self._known.add(id(value))
                self.callable(f"{path}.", value, depth + 1)
        elif not isinstance(value, types.ModuleType) and hasattr(value, "__dict__"):
            self._add(path, value)
            if id(value) not in self._known:
                self._known.add(id(value))
                for name, item in list(vars(value).items())[:_ITEMS]:
                    if torch.is_tensor(item) or isinstance(item, nn.Module):
                        self.whole(f"{path}.{name}", item, depth + 1)

    def _function(self, function: types.FunctionType, depth: int, owner: Any = None) -> None:
        code = function.__code__
        if depth > _DEEPEST:
            return
        reads = reads_of(code)
        bound = reads.bound
        if owner is not None:
            bound = bound | _bound_by(type(owner), function.__name__)
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=False):
            try:
                value = cell.cell_contents
            except ValueError:
                continue
            if name in reads.free and name not in bound and not is_only_updated(name, (function,)):
                self._read(name, value, reads.free[name], depth)
        if is_user_file(code.co_filename):
            for name, attributes in reads.globals.items():
                is_update = name not in bound and is_only_updated(name, (function,))
                if name in function.__globals__ and name not in bound and not is_update:
                    self._read(name, function.__globals__[name], attributes, depth)
            for name, value in (function.__kwdefaults__ or {}).items():
                self.whole(name, value, depth + 1)
            defaults = function.__defaults__ or ()
            for name, value in zip(code.co_varnames[code.co_argcount - len(defaults) :], defaults, strict=False):
                self.whole(name, value, depth + 1)
        if owner is not None and code.co_argcount:
            first = code.co_varnames[0]
            if first in reads.own:
                attributes = reads.own[first]
                self._read(first, owner, None if attributes is None else attributes - bound, depth, is_self=True)

    def _read(
        self, name: str, value: Any, attributes: frozenset[str] | None, depth: int, *, is_self: bool = False
    ) -> None:
        """Add a variable of which ``attributes`` are read."""
        if isinstance(value, type):
            for attribute in sorted((attributes or frozenset()) & vars(value).keys()):
                if torch.is_tensor(vars(value)[attribute]) or isinstance(vars(value)[attribute], PLAIN):
                    self._add(f"{name}.{attribute}", vars(value)[attribute])
            return
        if isinstance(value, types.ModuleType):
            if attributes is not None and is_user_file(stored_in(value).get("__file__") or "<frozen"):
                for attribute in sorted(attributes & vars(value).keys()):
                    self.whole(f"{name}.{attribute}", vars(value)[attribute], depth + 1)
            return
        if torch.is_tensor(value):
            if attributes is None or attributes - ASKS_FOR_SHAPE:
                self._add(name, value)
            return
        is_object = hasattr(value, "__dict__") and not isinstance(
            value, (*_NOT_FOLLOWED, types.FunctionType, types.MethodType, functools.partial)
        )
        if attributes is None or not is_object:
            self.whole(name, value, depth)
            return
        if not is_self:
            self._add(name, value)
        kind: Any = type(value)
        for attribute in sorted(attributes):
            if isinstance(value, nn.Module) and attribute in ("forward", "__call__"):
                self._module(name, value, depth)
                continue
            methods = functions_of(getattr_static(kind, attribute))
            if methods and kind.__module__.partition(".")[0] != "torch":
                for method in methods:
                    key = hash((id(method), id(value)))
                    if key not in self._known:
                        self._known.add(key)
                        self._function(method, depth + 1, value)
            elif (held := own_attribute(value, attribute, _NOTHING)) is not _NOTHING:
                self.whole(f"{name}.{attribute}", held, depth + 1)

    def _module(self, path: str, module: nn.Module, depth: int) -> None:
        """Add the state of a module that is called: parameters, buffers, and the attributes that forwards read."""
        for prefix, inner in module.named_modules(prefix=path):
            if id(inner) in self._known:
                continue
            self._known.add(id(inner))
            parameters, buffers = _torch.own_tensors(inner)
            kind: Any = type(inner)
            own, (names, functions) = vars(inner), _read_by_forward(kind)
            if buffers and only_updates_statistics(inner):
                buffers = {}
            buffers = {name: one for name, one in buffers.items() if not is_only_updated(name, functions)}
            for name, tensor in (*parameters.items(), *buffers.items()):
                if tensor is not None:
                    self._add(f"{prefix}.{name}", tensor)
            for name in names:
                if is_only_updated(name, functions):
                    continue
                # Forward pre-hooks set such attributes anew for each forward (torch.nn.utils.spectral_norm).
                if name in own and not (torch.is_tensor(own[name]) and _torch.has_forward_pre_hooks(inner)):
                    self.whole(f"{prefix}.{name}", own[name], depth + 1)
            for function in functions:
                self._function(function, depth + 1)

    def _add(self, path: str, value: Any) -> None:
        if torch.is_tensor(value):
            if id(value) in self._known:
                return
            self._known.add(id(value))
        if len(self.things) >= MOST_THINGS:
            raise TooMuchError
        self.things.setdefault(path, value)


_NOTHING = object()


def only_updates_statistics(module: nn.Module) -> bool:
    """Whether a module is a normalisation that writes its running statistics and does not read them.

    In training they are the result of a forward, not an input to it.
    """
    return module.training and isinstance(module, _torch.normalisation_classes())


def _read_by_forward(kind: Any) -> tuple[tuple[str, ...], tuple[types.FunctionType, ...]]:
    """The attributes that the forward of a module class reads and does not bind, and the user's functions in it."""
    reads = reads_of_method(kind, "forward")
    names = reads.attributes - (_MODULE_INTERNALS - {"training"}) - reads.bound
    return tuple(sorted(names)), tuple(one for one in reads.functions if is_user_file(one.__code__.co_filename))


def _bound_by(kind: Any, method: str) -> frozenset[str]:
    return reads_of_method(kind, method).bound


def is_only_updated(name: str, functions: Iterable[FunctionType]) -> bool:
    """Whether some of ``functions`` update the variable or attribute ``name``, and none reads it otherwise."""
    codes = [one.__code__ for one in functions]
    verdicts = [verdict for one in codes if (verdict := _verdict(one, one.co_filename, name)) is not None]
    return bool(verdicts) and all(verdicts)


# Cached by code, not by function, which keeps its closure alive. The file is part of the key: equal code is equal.
@functools.lru_cache(maxsize=4096)
def _verdict(code: CodeType, file: str, name: str) -> bool | None:
    """Whether every statement with ``name`` is an update of it; None where there is none, False without source."""
    if name not in (*code.co_names, *code.co_freevars, *code.co_varnames, *code.co_cellvars):
        return None
    tree = _tree(code, file)
    if tree is None:
        return False
    found = [one for statement in _simple(tree) if (one := _updates(statement, name)) is not None]
    return all(found) if found else None


@functools.lru_cache(maxsize=1024)
def _tree(code: CodeType, _: str) -> ast.AST | None:
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(code)))
    except (OSError, TypeError, SyntaxError):
        return None


def _simple(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield statements without a body, and the expressions in the heads of the others."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.stmt) and hasattr(node, "body"):
            yield from _simple(node)
        elif isinstance(node, (ast.stmt, ast.expr, ast.withitem)):
            yield node
        else:
            yield from _simple(node)


def _updates(statement: ast.AST, name: str) -> bool | None:
    """Whether a statement changes ``name`` and nothing else; None if it does not contain the name."""
    if isinstance(statement, (ast.Global, ast.Nonlocal)) or not any(
        _is_named(node, name) for node in ast.walk(statement)
    ):
        return None
    if isinstance(statement, (ast.AugAssign, ast.AnnAssign)):
        return _is_rooted(statement.target, name)
    if isinstance(statement, ast.Assign):
        return len(statement.targets) == 1 and _is_rooted(statement.targets[0], name)
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        called = statement.value.func
        # A method call that stands alone is there for its side effect, whatever its name.
        while isinstance(called, ast.Attribute) and isinstance(called.value, ast.Call):
            called = called.value.func
        return isinstance(called, ast.Attribute) and _is_rooted(called.value, name)
    return False


def _is_named(node: ast.AST, name: str) -> bool:
    return (isinstance(node, ast.Name) and node.id == name) or (isinstance(node, ast.Attribute) and node.attr == name)


def _is_rooted(node: ast.AST, name: str) -> bool:
    """Whether ``node`` is ``name`` or ``self.name``, or an element of it."""
    while isinstance(node, ast.Subscript):
        node = node.value
    return _is_named(node, name)
