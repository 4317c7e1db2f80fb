"""Right programs with tensors that have no memory of their own, or whose saved values hooks keep in another form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call, grad
from torch.utils.checkpoint import checkpoint

import gradsan

every_mode = pytest.mark.parametrize("mode", ["watch", "deep", "heal"])
both_forms = pytest.mark.parametrize("reentrant", [False, True])


@every_mode
def test_memory_that_torch_gives_to_a_fake_result(mode: str) -> None:
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(inplace=True), nn.Linear(6, 2))
    with gradsan.watch(mode) as watched, FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.empty(5, 4, requires_grad=True)
        net(x).sum().backward()
    assert watched.diagnoses == ()


@every_mode
def test_normalised_in_a_transform(mode: str) -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    x = torch.randn(6, 3)

    def loss(parameters: Any, buffers: Any) -> Any:
        return functional_call(net, (parameters, buffers), (x,)).pow(2).mean()

    with gradsan.watch(mode) as watched:
        for net.training in (True, False):
            buffers = {name: value.clone() for name, value in net.named_buffers()}
            grad(loss)({name: value.detach() for name, value in net.named_parameters()}, buffers)
    assert watched.diagnoses == ()
    assert "blind.collect_failed" not in [spot.key for spot in watched.report.seen.blind_spots]


def in_halves(block: Callable[[Any], Any], x: Any, reentrant: bool) -> Any:
    with saved_tensors_hooks(lambda value: value.half(), lambda value: value.float()):
        return checkpoint(block, x * 1.0, use_reentrant=reentrant)


@both_forms
def test_inputs_of_a_checkpoint_that_hooks_of_the_program_round(reentrant: bool) -> None:
    torch.manual_seed(0)
    scale = torch.full((50,), 1.5)
    with gradsan.watch("deep") as watched:
        x = torch.randn(50, requires_grad=True)
        in_halves(lambda value: value.exp().sin(), x, reentrant).sum().backward()
    assert watched.diagnoses == ()
    # What is changed beside is found all the same.
    with gradsan.watch("deep") as watched:
        y = in_halves(lambda value: (value * scale).sin(), x, reentrant)
        scale.zero_()
        y.sum().backward()
    assert [one.code for one in watched.diagnoses] == ["GS210"]
