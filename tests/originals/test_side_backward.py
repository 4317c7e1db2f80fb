"""Gradients computed on the side are autograd's own; of the program only what just computes runs once more for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.flop_counter import FlopCounterMode

import gradsan
from cases import each
from gradsan.graph import walk
from gradsan.originals.side_backward import UNKNOWN, gradients

Made = tuple[list[torch.Tensor], list[Any]]


def leaf(*shape: int, **kind: Any) -> torch.Tensor:
    return torch.randn(shape, requires_grad=True, **kind)


def broadcast() -> Made:
    a, b, c = leaf(4, 1), leaf(3), leaf()
    return [((a * b + c) ** 2).sum()], [a, b, c]


def views_written() -> Made:
    a, b = leaf(4, 3), leaf(3)
    out = a * 2
    out[1:3].mul_(b)
    out.T[0].exp_()
    return [out.sum(), out[0] * b.sum()], [a, b]


def several_outputs() -> Made:
    a, b = leaf(3, 4), leaf(4)
    first, second, _ = a.unbind(0)
    values, _ = torch.sort(second * b)
    return [first.cumsum(0).sum() * values[1], torch.linalg.svd(a)[1].sum()], [a, b]


def mixed_kinds() -> Made:
    a, b, c = leaf(3, dtype=torch.cdouble), leaf(3), leaf(3, dtype=torch.float64)
    return [((a * b).abs() + c).sum(), (b.bfloat16() * 2).float().sum()], [a, b, c]


def inner_and_edges() -> Made:
    a = leaf(3)
    inner = a.exp()
    out = inner.sin() * inner
    return [out.sum(), inner.sum()], [inner, get_gradient_edge(out), get_gradient_edge(a), a]


def sparse() -> Made:
    table, bag = nn.Embedding(7, 3, sparse=True), nn.Embedding(7, 3)
    ids = torch.tensor([1, 1, 5])
    return [(table(ids) * bag(ids)).sum() + table.weight.sum()], [table.weight, bag.weight]


def network() -> Made:
    net = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Flatten())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = nn.Linear(12, 2)(net(torch.randn(2, 2, 6, 6)))
    return [out.float().square().mean()], list(net.parameters())


def recurrent() -> Made:
    cell = nn.LSTM(3, 4, num_layers=2)
    x = leaf(5, 2, 3)
    out, (state, _) = cell(x)
    return [out.sum() * state.mean()], [x, *cell.parameters()]


def of_gradients() -> Made:
    a, b = leaf(3), leaf(3)
    (slope,) = torch.autograd.grad((a.sin() * b).pow(2).sum(), a, create_graph=True)
    return [slope.norm()], [a, b, leaf(2)]


def the_output_itself() -> Made:
    a = leaf()
    return [a, a * 2], [a]


PROGRAMS: tuple[Callable[[], Made], ...] = (
    broadcast,
    views_written,
    several_outputs,
    mixed_kinds,
    inner_and_edges,
    sparse,
    network,
    recurrent,
    of_gradients,
    the_output_itself,
)


@each("program", PROGRAMS, ids=lambda program: program.__name__)
def test_gradients_are_those_of_the_engine(program: Callable[[], Made]) -> None:
    torch.manual_seed(3)
    outputs, wanted = program()
    given = tuple(torch.randn_like(output) for output in outputs)
    right = torch.autograd.grad(outputs, wanted, given, retain_graph=True, allow_unused=True)
    order = walk.engine_order([one.grad_fn for one in outputs if one.grad_fn is not None])
    passed: list[str] = []
    found = gradients(tuple(outputs), given, wanted, order, lambda node: None, passed.append)
    assert passed == []
    assert [one is None for one in found] == [one is None for one in right]
    for one, other in zip(found, right, strict=True):
        if other is not None:
            assert one.dtype == other.dtype
            assert one.shape == other.shape
            torch.testing.assert_close(one, other)
    assert all(getattr(one, "grad", None) is None for one in wanted), "nothing is accumulated"


class Counted(torch.autograd.Function):
    calls = 0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        Counted.calls += 1
        return grad


def test_the_backward_of_a_function_is_the_programs_own_code() -> None:
    x, w, other = leaf(3), leaf(3), leaf(3)
    y = Counted.apply(x * w) * w + x.sum() * other
    passed: list[str] = []
    Counted.calls = 0
    order = walk.engine_order([y.grad_fn])
    found = gradients((y,), (torch.ones(3),), [x, w, other], order, lambda node: None, passed.append)
    assert found[0] is UNKNOWN
    assert found[1] is UNKNOWN
    torch.testing.assert_close(found[2], x.sum().expand(3))
    assert (passed, Counted.calls) == (["Counted"], 0)


def test_deep_mode_measures_what_does_not_depend_on_such_a_function() -> None:
    with gradsan.watch("deep") as watched:
        x, w, v = leaf(3), torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
        h = Counted.apply(x * w)
        y = h * v
        h.data.mul_(3)
        y.sum().backward()
    (one,) = watched.diagnoses
    assert one.gradient.relative_error == pytest.approx(2.0)
    assert "blind.not_measured_past_own_code" in [spot.key for spot in watched.report.seen.blind_spots]


def test_nothing_is_said_of_gradients_that_were_not_measured() -> None:
    with gradsan.watch("deep") as watched:
        x, v = leaf(3), torch.ones(3, requires_grad=True)
        h = x * 1
        y = Counted.apply(h * h) + v
        h.data.mul_(3)
        y.sum().backward()
    (one,) = watched.diagnoses
    assert (one.severity, one.gradient.status, one.gradient.relative_error) == ("error", "unknown", None)


def hooked(*, function: bool = False) -> tuple[list[str], list[Any]]:
    """A program with every kind of hook in which ``.data`` overwrites a saved value: who was called, what came out."""
    torch.manual_seed(0)
    calls: list[str] = []

    def told(what: str) -> Callable[..., None]:
        return lambda *_: calls.append(what)

    x, w, layer = leaf(4, 3), leaf(3), nn.Linear(3, 2)
    x.register_hook(told("leaf"))
    w.register_post_accumulate_grad_hook(told("accumulated"))
    layer.register_full_backward_hook(told("module"))
    layer.register_full_backward_pre_hook(told("module, before"))
    middle = x * w
    middle.register_hook(lambda grad: (calls.append("tensor"), grad * 2)[1])
    middle.retain_grad()
    assert middle.grad_fn is not None
    middle.grad_fn.register_hook(told("node"))
    middle.grad_fn.register_prehook(told("node, before"))
    torch.autograd.graph.register_multi_grad_hook((x, w), told("several"))
    y = middle.exp()
    if function:
        y = Counted.apply(y)
    square = y * y
    y.data.mul_(3)
    Counted.calls = 0
    with FlopCounterMode(display=False) as flops:
        (layer(y).sum() + square.sum()).backward()
    return [*calls, f"{Counted.calls} backwards"], [middle.grad, x.grad, w.grad, flops.get_total_flops()]


@each("mode", ["watch", "deep", "heal"])
@each("function", [False, True])
def test_hooks_run_as_often_as_without_gradsan(mode: Any, function: bool) -> None:
    calls, plain = hooked(function=function)
    with gradsan.watch(mode) as watched:
        calls_watched, values = hooked(function=function)
    assert calls_watched == calls
    assert calls.count("tensor") == calls.count("module") == calls.count("several") == 1
    found = [one for one in watched.diagnoses if one.code == "GS202"]
    assert found
    if mode != "heal":
        assert all(map(torch.equal, values[:3], plain[:3]))
        assert values[3] == plain[3]
    if mode != "watch":
        # What the hook of middle, or the Function, would make of another gradient is not known without running it.
        assert all(one.gradient.relative_error is None for one in found)
        assert "blind.not_measured_past_own_code" in [spot.key for spot in watched.report.seen.blind_spots]
