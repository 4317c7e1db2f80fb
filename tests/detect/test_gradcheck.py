"""``gradcheck`` moves inputs through ``.data`` between forward and backward, and puts them back: no finding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import gradcheck, gradgradcheck

import gradsan


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x**3

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x * x * grad


def double(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.double, requires_grad=True)


def complex_(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.cdouble, requires_grad=True)


def mixed(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a * b).sin() * a


def of_a_module() -> bool:
    layer = nn.Linear(3, 2).double()
    layer.weight.data.normal_()
    return gradcheck(lambda x, *_: layer(x), (double(4, 3), layer.weight, layer.bias))


def between_forward_and_backward() -> bool:
    a, b = double(3), double(3)
    loss = mixed(a, b).sum()
    is_right = gradcheck(mixed, (a, b))
    loss.backward()
    return is_right


CHECKS: dict[str, Callable[[], bool]] = {
    "one input": lambda: gradcheck(torch.exp, (double(3),)),
    "several": lambda: gradcheck(mixed, (double(3), double(3))),
    "complex": lambda: gradcheck(mixed, (complex_(3), complex_(3))),
    "fast": lambda: gradcheck(mixed, (double(3), double(3)), fast_mode=True),
    "fast, complex": lambda: gradcheck(mixed, (complex_(3), complex_(3)), fast_mode=True),
    "forward mode, batched": lambda: gradcheck(
        mixed, (double(3), double(3)), check_forward_ad=True, check_batched_grad=True
    ),
    "a Function": lambda: gradcheck(Cube.apply, (double(3),)),
    "twice, a Function": lambda: gradgradcheck(Cube.apply, (double(3),)),
    "twice": lambda: gradgradcheck(mixed, (double(3), double(3))),
    "a module": of_a_module,
    "between": between_forward_and_backward,
}


IN_SHORT = {
    "watch": ("one input", "fast", "a module"),
    "heal": ("several", "complex"),
    "early": ("a Function", "between"),
}
"""What is checked in a mode without ``--long``; in deep mode it is all."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode", ["watch", "deep", "heal", "early"])
def test_nothing_is_said(mode: Any, pytestconfig: pytest.Config) -> None:
    found = {}
    for check in CHECKS if pytestconfig.getoption("--long") else IN_SHORT.get(mode, CHECKS):
        torch.manual_seed(0)
        with gradsan.watch("deep", early=True) if mode == "early" else gradsan.watch(mode) as watched:
            assert CHECKS[check](), check
        found[check] = watched.diagnoses
    assert {check: told for check, told in found.items() if told} == {}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode", ["watch", "deep"])
def test_a_write_of_the_programs_own_is_reported_all_the_same(mode: Any) -> None:
    a, b = double(3), double(3)
    with gradsan.watch(mode) as watched:
        loss = mixed(a, b).sum()
        gradcheck(mixed, (a, b))
        a.data.mul_(2)
        loss.backward()
    assert {one.code for one in watched.diagnoses} == {"GS202"}
