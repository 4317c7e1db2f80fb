"""Functions and modules of the program: their source, the arguments of a call, hooks around a ``forward``."""

from __future__ import annotations

import ast
import functools
import sys
from typing import Any

from torch import nn

from gradsan import _torch
from gradsan.postmortem.lookup import Namespace, Value, made, of_thing
from gradsan.record.stacks import file_of, is_user_file
from gradsan.source.tree import SourceFile, read_source

_NOT_READ = frozenset({"IPython", "ipykernel", "_pytest", "pluggy", "pytest", "numpy", "gradsan", "tqdm"})


def is_user_function(function: Any) -> bool:
    """Whether a function is defined in a file of the user's."""
    code = getattr(function, "__code__", None)
    return code is not None and is_user_file(code.co_filename)


def is_readable(function: Any) -> bool:
    """Whether a function's source is worth following: the user's, libraries', of torch that of layers and averages."""
    module = getattr(function, "__module__", "") or ""
    if is_user_function(function):
        return True
    head = module.partition(".")[0]
    if head == "torch":
        is_layer = module.startswith(("torch.nn.modules", "torch.nn.functional", "torch.optim.swa_utils"))
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


def decorator_switch(function: Any) -> bool | None:
    """False where a decorator of a function switches grad mode off, None where none sets it."""
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


def closed_over(function: Any) -> dict[str, Value]:
    """The variables of outer functions that a function uses."""
    found: dict[str, Value] = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        try:
            found[name] = of_thing(cell.cell_contents)
        except ValueError:
            continue
    return found


def arguments_of(node: Any, args: list[Value], keywords: dict[str, Value], function: Any) -> dict[str, Value]:
    """The parameters of a function with the arguments of a call; else their defaults, where these are known."""
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


def last_name(node: ast.expr) -> str:
    """The last name of a call's callee, or of an attribute: ``c`` of ``a.b.c()``."""
    function = node.func if isinstance(node, ast.Call) else node
    return (
        function.attr if isinstance(function, ast.Attribute) else function.id if isinstance(function, ast.Name) else "?"
    )


def given_by_hooks(reader: Any, module: Value, args: list[Value], node: ast.expr, space: Namespace) -> list[Value]:
    """The arguments of ``forward``, after the user's pre-hooks have been analysed."""
    for hook in filter(_is_users, _torch.forward_pre_hooks(module.thing)):
        found = reader.called(of_thing(hook), [module, Value(items=args)], {}, node, space)
        if found.items is not None:
            args = found.items
        elif found.memory:
            args = [found]
    return args


def returned_by_hooks(
    reader: Any, module: Value, args: list[Value], result: Value, node: ast.expr, space: Namespace
) -> Value:
    """The result of a module's call, after the user's forward hooks have been analysed."""
    for hook in filter(_is_users, _torch.forward_hooks(module.thing)):
        found = reader.called(of_thing(hook), [module, Value(items=args), result], {}, node, space)
        if found.items is not None or found.memory:
            result = found
    return result


def is_chain(module: nn.Module) -> bool:
    """Whether a module only calls its children, each on the result of the one before."""
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward


def chained(reader: Any, module: nn.Sequential, args: list[Value], node: ast.expr, space: Namespace) -> Value:
    """The result of a chain; its own frame is between the caller's and those of its children."""
    code = nn.Sequential.forward.__code__
    file = file_of(code)
    source = read_source(file)
    definition = None if source is None else definition_at(source, code.co_firstlineno, code.co_name)
    calls = [] if definition is None else [one for one in ast.walk(definition) if isinstance(one, ast.Call)]
    outer = reader.frames
    if calls:
        reader.frames = (*outer, reader.frame_at(node, space))
        globals_of = nn.Sequential.forward.__globals__
        node, space = calls[0], Namespace(file, "Sequential.forward", {}, {}, None, reader.module_of(globals_of, file))
    result = args[0] if args else made()
    for child in module.children():
        result = reader.called(of_thing(child), [result], {}, node, space)
    reader.frames = outer
    return result


def _is_users(hook: Any) -> bool:
    while isinstance(hook, functools.partial):
        hook = hook.func
    function = getattr(hook, "__func__", hook)
    return is_user_function(function) or is_user_function(vars(type(function)).get("__call__"))
