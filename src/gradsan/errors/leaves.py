"""Clues to errors and warnings about leaves: which of the live variables require a gradient.

Roles: ``live``, one clue for each of the user's frames, outermost first; ``values``: ``requires_grad`` (expression ->
whether it does; of a module, whether any parameter does) and ``callees`` (expression -> file, first line and name of
what runs). ``mode``: whether gradients are switched on (``grad_enabled``). ``loss``: its ``shape``, ``dtype`` and
``device``.

Role: ``made`` (the operation that made the tensor; ``name`` as the source says it; ``values``: ``is_update``, whether
the statement that made it reads ``.grad`` itself, and ``shape``, ``dtype``, ``device``).
"""

from __future__ import annotations

import ast
import threading
import types
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from gradsan import _torch, source
from gradsan.graph.values import tensor_of
from gradsan.model import Clue
from gradsan.record.stacks import file_of, is_user_file, symbolise

if TYPE_CHECKING:
    from gradsan.errors.failures import Context

LIVE_ROWS = ("no_graph",)

_MOST_NAMES = 300


def gather_live(context: Context) -> tuple[Clue, ...]:
    """The mode, and the clues of the frames from the failing one outwards."""
    frame = context.frame
    found = [Clue("mode", values={"grad_enabled": torch.is_grad_enabled()})]
    losses = [] if context.backward is None else [one for one in context.backward.outputs if torch.is_tensor(one)]
    found += [
        Clue(
            "loss",
            values={
                "shape": tuple(one.shape),
                "dtype": str(one.dtype).removeprefix("torch."),
                "device": str(one.device),
            },
        )
        for one in losses[:1]
    ]
    while frame is not None:
        if is_user_file(frame.f_code.co_filename):
            found.append(_of_frame(frame))
        frame = frame.f_back
    return tuple(reversed(found))


def _of_frame(frame: Any) -> Clue:
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
        answer = _requires_grad(value)
        if answer is not None:
            requires[name] = answer
        code = _code_of(value)
        if code is not None and is_user_file(code.co_filename):
            callees[name] = (file_of(code), code.co_firstlineno, code.co_name)
    code = frame.f_code
    return Clue("live", name=code.co_name, values={"requires_grad": requires, "callees": callees})


def _requires_grad(value: Any) -> bool | None:
    if torch.is_tensor(value):
        return bool(value.requires_grad)
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


NON_LEAF_ROWS = ("grad_of_non_leaf",)


def gather_non_leaf(context: Context) -> tuple[Clue, ...]:
    """The tensor whose ``.grad`` is read, where the source names it."""
    own = context.site.user_frame
    found = None if own is None else source.expression_at(own)
    if found is None or not isinstance(found.node, ast.Attribute) or context.frame is None:
        return ()
    name = found.source.text(found.node.value)
    tensor = tensor_of(context.frame, name)
    number = None if tensor is None or tensor.grad_fn is None else _torch.node_sequence(tensor.grad_fn)
    if number is None:
        return (Clue("made", name=name),)
    near: list[Any] = context.core.nodes_near(number, threading.get_ident())
    made = next((symbolise(entry[3]) for entry in near if entry[0] <= number < entry[1]), None)
    frame = None if made is None else made.user_frame
    values = {
        "is_update": frame is not None and source.reads_gradient(frame),
        "shape": tuple(tensor.shape),
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "device": str(tensor.device),
    }
    return (Clue("made", made, name=name, op=tensor.grad_fn.name(), values=values),)
