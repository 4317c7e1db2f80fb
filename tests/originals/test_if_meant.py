"""Deep mode measures what gradients would be if an unrecorded write were meant, and is silent where nobody knows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import gradsan
from cases import each
from gradsan.present.json import as_dict, from_dict
from gradsan.record.recorder import recorder

X = torch.linspace(-1, 1, 24).reshape(6, 4)
KEEP = torch.tensor([[1.0, 0.5, 2.0]])


def loss_with_penalty(net: nn.Linear, is_right: bool) -> Any:
    loss = net(X).pow(2).mean()
    penalty = 0.3 * net.weight.abs().sum()
    if is_right:
        return loss + penalty
    loss.data += penalty
    return loss


def sum_divided_later(net: nn.Linear, is_right: bool) -> Any:
    total = net(X).pow(2).sum()
    if is_right:
        total = total - 0.5 * net.weight.pow(2).sum() + net.bias.sum()
    else:
        total.data.sub_(0.5 * net.weight.pow(2).sum())
        total.data += net.bias.sum()
    return total / len(X)


def value_scaled(net: nn.Linear, is_right: bool) -> Any:
    h = net(X)
    if is_right:
        h = h * KEEP / 4 + 1
    else:
        with torch.no_grad():
            h.mul_(KEEP)
            h /= 4
            h += 1
    return h.exp().mean()


def saved_by_its_reader(net: nn.Linear, is_right: bool) -> Any:
    h = net(X)
    if is_right:
        h = h * KEEP
    else:
        with torch.no_grad():
            h.mul_(KEEP)
    return h.pow(3).mean()


def scaled_through_data(net: nn.Linear, is_right: bool) -> Any:
    h = net(X)
    if is_right:
        h = h * 0.1
    else:
        h.data *= 0.1
    return h.softmax(1)[:, 0].sum()


def gradients(program: Callable[..., Any], is_right: bool) -> tuple[nn.Linear, list[torch.Tensor]]:
    torch.manual_seed(0)
    net = nn.Linear(4, 3)
    loss = program(net, is_right)
    loss.backward()
    return net, [net.weight.grad, net.bias.grad]


def measured(program: Callable[..., Any]) -> Any:
    recorder().core.clear()
    with gradsan.watch("deep") as watched:
        gradients(program, False)
    found, *others = (one for one in watched.diagnoses if one.code == "GS215")
    assert all(one.gradient == found.gradient for one in others)
    again = from_dict(as_dict(watched.report, language="en")).report
    assert [one.gradient for one in again.diagnoses] == [one.gradient for one in watched.diagnoses]
    assert ("note.if_meant" in [note.key for note in found.notes]) == (found.gradient.if_meant is not None)
    return found.gradient.if_meant


@each("program", [loss_with_penalty, sum_divided_later, scaled_through_data, value_scaled, saved_by_its_reader])
def test_the_difference_is_that_to_the_right_twin(program: Callable[..., Any]) -> None:
    (_, wrong), (_, right) = gradients(program, False), gradients(program, True)
    errors = {
        name: float((one - other).norm() / other.norm())
        for name, one, other in zip(("weight", "bias"), wrong, right, strict=True)
        if not torch.allclose(one, other, rtol=1e-5)
    }
    found = {name.rpartition(".")[2]: error for name, error in measured(program).errors}
    assert found == pytest.approx(errors, rel=1e-4)


def read_before_and_after(net: nn.Linear, is_right: bool) -> Any:
    h = net(X)
    first = h.sum()
    with torch.no_grad():
        h.mul_(KEEP)
    return h.exp().mean() + first


def bounded_too(net: nn.Linear, is_right: bool) -> Any:
    h = net(X)
    with torch.no_grad():
        h.mul_(KEEP)
        h.clamp_(-0.1, 0.1)
    return h.exp().mean()


def factor_changed_afterwards(net: nn.Linear, is_right: bool) -> Any:
    h, keep = net(X), KEEP.clone()
    with torch.no_grad():
        h.mul_(keep)
    keep.zero_()
    return h.exp().mean()


@each("program", [read_before_and_after, bounded_too, factor_changed_afterwards])
def test_nothing_is_said_where_it_is_not_known(program: Callable[..., Any]) -> None:
    assert measured(program) is None
