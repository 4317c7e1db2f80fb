"""Calls of modules: the program's hooks around a ``forward``, and modules that run one after another."""

from __future__ import annotations

import ast
import functools
from typing import Any

from torch import nn

from gradsan import _torch
from gradsan.postmortem.functions import definition_at, is_user_function
from gradsan.postmortem.values import Namespace, Value, made, of_thing
from gradsan.record.stacks import file_of
from gradsan.source.tree import read_source


def given_by_hooks(reader: Any, module: Value, args: list[Value], node: ast.expr, space: Namespace) -> list[Value]:
    """What ``forward`` gets, once the pre-hooks of the program's have been read."""
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
    """What a module's call gives back, once the forward hooks of the program's have been read."""
    for hook in filter(_is_users, _torch.forward_hooks(module.thing)):
        found = reader.called(of_thing(hook), [module, Value(items=args), result], {}, node, space)
        if found.items is not None or found.memory:
            result = found
    return result


def is_chain(module: Any) -> bool:
    """Whether a module does nothing but call its children, one on the result of the other."""
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward


def chained(reader: Any, module: nn.Sequential, args: list[Value], node: ast.expr, space: Namespace) -> Value:
    """What a chain gives back; its own frame stands between the caller's and those of its children."""
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
