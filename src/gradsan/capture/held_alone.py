"""How many hold a gradient that was given to a hook, and that no other branch needs: tried out once, on tiny graphs.

Each kind of hook is called by other code of torch's, which holds the gradient meanwhile, and no two versions do it
alike.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from gradsan.capture import _torch

TENSOR, NODE, MODULE, FUNCTION = "hook", "node_hook", "module_hook", "function_backward"


def kind_of(files: list[str], arguments: list[Any]) -> str:
    """The kind of hook: by the files of torch's frames around it, and by its arguments (tensors and tuples)."""
    if torch.autograd.function.__file__ in files:
        return FUNCTION
    tuples = sum(isinstance(one, tuple) for one in arguments)
    if files:
        return f"{MODULE}_{tuples}"
    return f"{NODE}_{tuples}" if tuples else TENSOR


def within(kind: str, position: int, is_element: bool) -> str:
    """The kind of one gradient of such a hook; ``position`` counts the arguments that have gradients."""
    return f"{kind}[{position}]" if is_element and kind != FUNCTION else kind


@functools.cache
def counts() -> dict[str, int]:
    """How many hold a gradient alone, by its kind; empty where torch does not tell. Nothing is saved for it."""
    found: dict[str, int] = {}
    with _torch.hushed(), torch.enable_grad():
        x = torch.ones(2, device="cpu", requires_grad=True)
        h: Any = x * 2
        module = _Doubling()
        _listen(found, h, module)
        for used in (h, module(x * 2), _doubled_by_function(found)(x * 2)):
            torch.autograd.grad((used * 2).sum(), x)
    return found


class _Doubling(nn.Module):
    def forward(self, x: Any) -> Any:
        return x * 2


def _listen(found: dict[str, int], h: Any, module: nn.Module) -> None:
    def of_tensor(grad: Any) -> None:
        _note(found, TENSOR, (grad,))

    def before_node(outer: Any) -> None:
        _note(found, f"{NODE}_1[0]", outer)

    def after_node(inner: Any, outer: Any) -> None:
        _note(found, f"{NODE}_2[0]", inner)
        _note(found, f"{NODE}_2[1]", outer)

    def before_module(_: Any, outer: Any) -> None:
        _note(found, f"{MODULE}_1[0]", outer)

    def after_module(_: Any, inner: Any, outer: Any) -> None:
        _note(found, f"{MODULE}_2[0]", inner)
        _note(found, f"{MODULE}_2[1]", outer)

    h.register_hook(of_tensor)
    h.grad_fn.register_prehook(before_node)
    h.grad_fn.register_hook(after_node)
    module.register_full_backward_pre_hook(before_module)
    module.register_full_backward_hook(after_module)


def _doubled_by_function(found: dict[str, int]) -> Any:
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x * 2

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            _note(found, FUNCTION, grads)
            return grads[0] * 2

    return Doubled.apply


def _note(found: dict[str, int], kind: str, given: tuple[Any, ...]) -> None:
    for one in given:
        count = None if one is None else _torch.use_count(one)
        if count is not None:
            found[kind] = count
