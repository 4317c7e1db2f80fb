"""What is alive in the user's frames, for a reader of the source: what requires a gradient, what is called."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from gradsan.model import Clue
from gradsan.record.stacks import file_of, is_user_file

_MOST_NAMES = 300


def live_clues(
    frame: Any, requires_grad: Callable[[Any], bool] = lambda tensor: bool(tensor.requires_grad)
) -> tuple[Clue, ...]:
    """A clue ``live`` for each of the user's frames from ``frame`` outwards, outermost first.

    ``values``: ``requires_grad`` (expression -> what ``requires_grad`` says of the tensor; of a module, whether any
    parameter does) and ``callees`` (expression -> file, first line and name of what runs).
    """
    found = []
    while frame is not None:
        if is_user_file(frame.f_code.co_filename):
            found.append(_of_frame(frame, requires_grad))
        frame = frame.f_back
    return tuple(reversed(found))


def _of_frame(frame: Any, requires_grad: Callable[[Any], bool]) -> Clue:
    requires: dict[str, bool] = {}
    callees: dict[str, tuple[str, int, str]] = {}
    variables = {**frame.f_globals, **frame.f_locals}
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
    for name, value in named[:_MOST_NAMES]:
        answer = _answer(value, requires_grad)
        if answer is not None:
            requires[name] = answer
        code = _code_of(value)
        if code is not None and is_user_file(code.co_filename):
            callees[name] = (file_of(code), code.co_firstlineno, code.co_name)
    code = frame.f_code
    return Clue("live", name=code.co_name, values={"requires_grad": requires, "callees": callees})


def _answer(value: Any, requires_grad: Callable[[Any], bool]) -> bool | None:
    if torch.is_tensor(value):
        return requires_grad(value)
    if isinstance(value, nn.Module):
        return any(parameter.requires_grad for parameter in value.parameters())
    return None


def _code_of(value: Any) -> Any:
    if isinstance(value, nn.Module):
        value = type(value).forward
    value = getattr(value, "__func__", value)
    # A decorator that keeps what it wraps (no_grad does) hides no line of the user's.
    while isinstance(value, types.FunctionType) and hasattr(value, "__wrapped__"):
        value = value.__wrapped__
    return value.__code__ if isinstance(value, types.FunctionType) else None
