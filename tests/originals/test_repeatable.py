"""Custom Functions that may run once more to measure a gradient: those whose backward does nothing but compute."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn, sigmoid
from torch.autograd import Function
from torch.autograd.function import once_differentiable

import gradsan
from cases import each
from gradsan.graph import walk
from gradsan.originals.side_backward import UNKNOWN, gradients

SLOPE, LOG, NET = 0.1, [], nn.Linear(3, 3)


class Keeping(Function):
    """What all of these have in common: ``x`` is saved, and the result is its exponential."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *rest: Any) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.rest, ctx.width, ctx.list = rest, 2.0, [1, x.shape]
        return x.exp()


class Square(Keeping):
    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return 2 * x * grad


class Clamped(Keeping):
    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x = ctx.saved_tensors[0]
        result = grad.clone()
        result[x < 0] = 0
        result[..., 0] = -SLOPE
        return result, None, None


class Surrogate(Keeping):
    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        if not ctx.needs_input_grad[0]:
            return None
        scale = math.pi / 2 * ctx.width
        for power in range(1, 3):
            scale = scale + power
        return grad * scale / (1 + (math.pi * x).pow(2)) * torch.where(x > 0, sigmoid(x), torch.tanh(x))


class Linear(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, name: str, weight: torch.Tensor, fixed: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight) + fixed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        gx = gw = None
        if ctx.needs_input_grad[0]:
            gx = grad @ weight
        if ctx.needs_input_grad[2]:
            gw = grad.transpose(0, 1).mm(x)
        return gx, None, gw, None


class Plain(Keeping):
    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return F.logsigmoid(x) * grad.to(torch.float32).reshape(ctx.list[1])


def x_of(rows: int = 2) -> torch.Tensor:
    return torch.randn(rows, 3, requires_grad=True)


def measured(output: torch.Tensor, wanted: list[Any], passed: list[str] | None = None) -> list[Any]:
    order = walk.engine_order([output.grad_fn])
    over = [] if passed is None else passed
    found = gradients((output,), (torch.ones_like(output),), wanted, order, lambda node: None, over.append)
    assert passed is not None or not over
    return found


@each("kind", [Square, Clamped, Surrogate, Plain])
@each("rest", [(), (None, "name")])
def test_functions_that_only_compute_are_run(kind: Any, rest: Any) -> None:
    if rest and kind is not Clamped:
        rest = ()
    x = x_of()
    y = kind.apply(x * 2, *rest).sin()
    (right,) = torch.autograd.grad(y, x, torch.ones_like(y), retain_graph=True)
    torch.testing.assert_close(measured(y, [x])[0], right)


def test_results_go_to_the_inputs_that_need_them() -> None:
    x, weight, fixed = x_of(), x_of(4), torch.ones(4)
    y = Linear.apply(x * 1, "name", weight, fixed)
    right = torch.autograd.grad(y, [x, weight], torch.ones_like(y), retain_graph=True)
    for one, other in zip(measured(y, [x, weight]), right, strict=True):
        torch.testing.assert_close(one, other)


class Counts(Keeping):
    calls = 0

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        Counts.calls += 1
        return grad


class Logs(Keeping):
    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        LOG.append(grad)
        return grad


class Prints(Keeping):
    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        print(grad)
        return grad


class WritesGradient(Keeping):
    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        grad *= 2
        return grad


class WritesByMethod(Keeping):
    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad.mul_(2)


class WritesByIndex(Keeping):
    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        grad[0] = 0
        return grad


class WritesByAlias(Keeping):
    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        result = grad.clone()
        if ctx.width:
            result = grad
        result[0] = 0
        return result


class WritesOut(Keeping):
    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return torch.mul(grad, 2, out=grad)


class WritesSaved(Keeping):
    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return F.relu(ctx.saved_tensors[0], True) * grad


class KeepsOnContext(Keeping):
    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        ctx.done = True
        return grad


class CallsModule(Keeping):
    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return NET(grad)


class CallsOnContext(Keeping):
    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return ctx.rest[0](grad)


class Draws(Keeping):
    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad + torch.rand_like(grad)


class Differentiates(Keeping):
    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        with torch.enable_grad():
            return grad


class Communicates(Keeping):
    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return torch.distributed.all_reduce(grad)


class ReadsFile(Keeping):
    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad * len(Path(__file__).read_text())


def doubled(grad: torch.Tensor) -> torch.Tensor:
    return grad * 2


class CallsHelper(Keeping):
    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return doubled(grad)


IMPURE = [
    Counts,
    Logs,
    Prints,
    WritesGradient,
    WritesByMethod,
    WritesByIndex,
    WritesByAlias,
    WritesOut,
    WritesSaved,
    KeepsOnContext,
    CallsModule,
    CallsOnContext,
    Draws,
    Differentiates,
    Communicates,
    ReadsFile,
    CallsHelper,
]


@each("kind", IMPURE)
def test_functions_with_side_effects_are_not_run(kind: Any) -> None:
    x = x_of()
    y = kind.apply(x * 2).sin()
    passed: list[str] = []
    assert measured(y, [x], passed)[0] is UNKNOWN
    assert passed == [kind.__name__]


def test_an_object_on_the_context_is_not_called() -> None:
    x = x_of()
    y = CallsOnContext.apply(x * 2, LOG.append)
    assert measured(y, [x], [])[0] is UNKNOWN
    assert LOG == []


def test_deep_mode_measures_past_a_function() -> None:
    x = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    with gradsan.watch("deep") as watched:
        h = x * 2
        y = Square.apply(h * h)
        h.data.mul_(2)
        y.sum().backward()
    (one,) = watched.diagnoses
    assert one.gradient.status == "wrong"
    assert one.gradient.relative_error == pytest.approx(1.0)
    assert watched.report.seen.blind_spots == ()
