"""Values in the user's frames: expressions read without running code, tensors that require grad, callables."""

from __future__ import annotations

import ast
import dis
import functools
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from types import FrameType
from typing import Any

import torch
from torch import nn

from gradsan import _torch
from gradsan.model import LiveClue
from gradsan.record.stacks import file_of, is_user_file

_MISSING = object()


def tensor_of(frame: FrameType, text: str) -> Any:
    """Return the tensor that ``text`` (``w``, ``self.lin.weight``, ``xs[0]``) refers to in ``frame``; None if none."""
    value = value_of(frame, text)
    return value if torch.is_tensor(value) else None


def value_of(frame: FrameType, text: str) -> Any:
    """Return the value of ``text`` in ``frame``; None where that cannot be decided.

    Only names, attributes stored in objects, and elements of Python's own containers are looked up.
    """
    try:
        node = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError):
        return None
    value = _value(node, frame)
    return None if value is _MISSING else value


def first_named(frame: FrameType, names: list[str], wanted: Callable[[Any], bool]) -> tuple[str, Any] | None:
    """Return the first of the expressions ``names`` that is a tensor for which ``wanted`` is true, and the tensor."""
    for name in names:
        tensor = tensor_of(frame, name)
        if tensor is not None and wanted(tensor):
            return name, tensor
    return None


def own_attribute(owner: Any, name: str, missing: Any) -> Any:
    """Return an attribute stored in an object itself, of a module also parameters, buffers and children."""
    if isinstance(owner, nn.Module):
        for kept in (*map(dict.items, _torch.own_tensors(owner)), owner.named_children()):
            for known, value in kept:
                if known == name:
                    return value
    variables = getattr(owner, "__dict__", None)
    return variables.get(name, missing) if isinstance(variables, Mapping) else missing


def _value(node: ast.expr, frame: FrameType) -> Any:
    if isinstance(node, ast.Name):
        local = _torch.locals_of(frame)
        return local[node.id] if node.id in local else frame.f_globals.get(node.id, _MISSING)
    if isinstance(node, ast.Attribute):
        return own_attribute(_value(node.value, frame), node.attr, _MISSING)
    if isinstance(node, ast.Subscript):
        key = _key(node.slice, frame)
        return _MISSING if key is _MISSING else _element(_value(node.value, frame), key)
    return _MISSING


def _key(node: ast.expr, frame: FrameType) -> Any:
    if isinstance(node, ast.Constant):
        return node.value
    found = _value(node, frame) if isinstance(node, ast.Name) else _MISSING
    return found if isinstance(found, int | str) else _MISSING


def _element(owner: Any, key: Any) -> Any:
    if type(owner) not in (list, tuple, dict):
        return _MISSING
    try:
        return owner[key]
    except (KeyError, IndexError, TypeError):
        return _MISSING


_MOST_NAMES = 300


def live_clues(
    frame: FrameType | None, requires_grad: Callable[[Any], bool] = lambda tensor: bool(tensor.requires_grad)
) -> tuple[LiveClue, ...]:
    """Return a clue ``live`` for each of the user's frames from ``frame`` outwards, outermost first.

    ``values``: ``requires_grad`` (expression -> result of ``requires_grad`` for the tensor; for a module, whether any
    parameter does), ``callees`` (expression -> file, first line and name of the function) and ``switched_off`` (the
    modules of which no parameter requires grad, though an optimizer has them), ``in_vain`` (those of them whose
    optimizer has nothing else) and ``untrained`` (modules that no optimizer has, where one has others).
    """
    frames = []
    while frame is not None:
        if is_user_file(frame.f_code.co_filename):
            frames.append((frame, _named(frame)))
        frame = frame.f_back
    optimizers = [value for _, named in frames for _, value in named if isinstance(value, torch.optim.Optimizer)]
    held = {id(one) for one in _torch.parameters_of(*optimizers)}
    return tuple(_of_frame(one, named, requires_grad, held) for one, named in reversed(frames))


def _named(frame: FrameType) -> list[tuple[str, Any]]:
    """The variables of a frame, and what its ``self`` has, by expression."""
    variables = {**frame.f_globals, **_torch.locals_of(frame)}
    named = [(name, value) for name, value in variables.items() if not name.startswith("__")]
    own = variables.get("self")
    if own is not None and hasattr(own, "__dict__"):
        named += [(f"self.{name}", value) for name, value in list(vars(own).items())]
        if isinstance(own, nn.Module):
            named += [(f"self.{name}", value) for name, value in own.named_children()]
            named += [(f"self.{name}", value) for name, value in own.named_parameters(recurse=False)]
        named += [
            (f"self.{name}", getattr(own, name))
            for name, value in vars(type(own)).items()
            if isinstance(value, types.FunctionType)
        ]
    return named


def name_bound_to(value: Any, frame: FrameType | None) -> str | None:
    """Return the expression by which the nearest user frame, from ``frame`` outwards, holds that very object."""
    while frame is not None:
        if is_user_file(frame.f_code.co_filename):
            found = next((name for name, one in _named(frame) if one is value), None)
            if found is not None:
                return found
        frame = frame.f_back
    return None


def _of_frame(
    frame: FrameType, named: list[tuple[str, Any]], requires_grad: Callable[[Any], bool], held: set[int]
) -> LiveClue:
    requires: dict[str, bool] = {}
    callees: dict[str, tuple[str, int, str]] = {}
    for name, value in named[:_MOST_NAMES]:
        answer = _answer(value, requires_grad)
        if answer is not None:
            requires[name] = answer
        code = _code_of(value)
        if code is not None and is_user_file(code.co_filename):
            callees[name] = (file_of(code), code.co_firstlineno, code.co_name)
    code = frame.f_code
    optimizers = [value for _, value in named if isinstance(value, torch.optim.Optimizer)]
    variables_of = dict(named)
    modules = [(name, value) for name, value in named[:_MOST_NAMES] if isinstance(value, nn.Module)]
    for name, value in ((f"{at}.{path}", one) for at, outer in modules for path, one in outer.named_modules() if path):
        # What a method of the module knows as an attribute of its own.
        if len(requires) < _MOST_NAMES and name not in requires:
            requires[name] = bool(_answer(value, requires_grad))
            code = _code_of(value)
            if code is not None and is_user_file(code.co_filename):
                callees[name] = (file_of(code), code.co_firstlineno, code.co_name)
    own = {id(one) for one in _torch.parameters_of(*optimizers)}
    switched_off = [
        name for name, value in modules if requires[name] is False and own & set(map(id, value.parameters()))
    ]
    idle = {id(one) for optimizer in optimizers for one in _held_in_vain(optimizer)}
    in_vain = [name for name in switched_off if idle & set(map(id, variables_of[name].parameters()))]
    return LiveClue(
        "live",
        name=code.co_name,
        requires_grad=requires,
        callees=callees,
        switched_off=tuple(switched_off),
        in_vain=tuple(in_vain),
        untrained=tuple(
            name for name, value in modules if requires[name] and held and not held & set(map(id, value.parameters()))
        ),
    )


def _held_in_vain(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Return the parameters of an optimizer, if none of them requires grad; else none."""
    parameters = list(_torch.parameters_of(optimizer))
    return [] if any(one.requires_grad for one in parameters) else parameters


def _answer(value: Any, requires_grad: Callable[[Any], bool]) -> bool | None:
    if torch.is_tensor(value):
        return requires_grad(value)
    if isinstance(value, nn.Module):
        return any(parameter.requires_grad for parameter in value.parameters())
    return None


def _code_of(value: Any) -> Any:
    if isinstance(value, nn.Module):
        value = type(value).forward
    elif not isinstance(value, type) and not hasattr(value, "__code__"):
        # A callable object, such as a loss with a ``__call__`` of its own.
        value = next((vars(one)["__call__"] for one in type(value).__mro__ if "__call__" in vars(one)), value)
    value = getattr(value, "__func__", value)
    # A transparent decorator (such as no_grad) hides no line of the user's.
    while isinstance(value, types.FunctionType) and hasattr(value, "__wrapped__"):
        value = value.__wrapped__
    return value.__code__ if isinstance(value, types.FunctionType) else None


def leads_through_library(path: str, around: Iterable[tuple[str, Any]]) -> bool:
    """Whether the expression takes a private attribute of a library's object: ``trainer.profiler._module``.

    ``around`` has the objects on it, each with the expression that leads there.
    """
    privates = [value for one, value in around if path[len(one) :].startswith("._")]
    files = (getattr(sys.modules.get(type(value).__module__), "__file__", None) for value in privates)
    return any(file is not None and not is_user_file(file) for file in files)


def is_loop_variable(frame: FrameType, name: str) -> bool:
    """Whether ``name`` is a variable of a ``for`` loop in the code of ``frame``."""
    return name in loop_variables(frame.f_code)


@functools.lru_cache(maxsize=1024)
def loop_variables(code: types.CodeType) -> frozenset[str]:
    """Return the variables that the ``for`` loops of a function or module assign."""
    names: set[str] = set()
    awaited = 0
    for instruction in dis.get_instructions(code):
        if instruction.opname == "FOR_ITER":
            awaited = 1
        elif awaited and instruction.opname.startswith("UNPACK"):
            awaited += int(instruction.arg or 0) - 1
        elif awaited and instruction.opname.startswith("STORE_"):
            stored = instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,)
            names.update(str(name) for name in stored)
            awaited = max(0, awaited - len(stored))
        elif instruction.opname not in ("CACHE", "EXTENDED_ARG"):
            awaited = 0
    return frozenset(names)
