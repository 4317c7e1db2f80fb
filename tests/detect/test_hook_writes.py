"""Writes of hooks past the version counter in a backward: a finding if, and only if, the gradient differs."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import gradsan
from cases import each
from gradsan.detect.prescan import Prescan
from gradsan.record.recorder import recorder

Write = Callable[[torch.Tensor], Any]


def begin_anew() -> None:
    """Forget what was logged: lines are known by their stacks, which equal each other in all cases of a test."""
    recorder().core.clear()


rounds_begin_anew = pytest.fixture(autouse=True)(begin_anew)
each_anew = functools.partial(each, before=begin_anew)


class Passing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, act: Any) -> torch.Tensor:
        ctx.act = act
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        ctx.act()
        return grad * 1, None


class Identity(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 1


def quietly(act: Callable[[], Any]) -> Callable[..., None]:
    def hook(*_: Any) -> None:
        act()

    return hook


def of_the_result(act: Any, h: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    z = y * w
    z.register_hook(quietly(act))
    return z


def of_the_product(act: Any, h: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y.register_hook(quietly(act))
    return y * w


def of_the_value(act: Any, h: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    h.register_hook(quietly(act))
    return y * w


def before_the_node(act: Any, h: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    def hook(outer: tuple[torch.Tensor, ...]) -> None:
        act()

    y.grad_fn.register_prehook(hook)
    return y * w


def after_the_node(act: Any, h: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y.grad_fn.register_hook(quietly(act))
    return y * w


def after_the_node_before(act: Any, h: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    z = y * w
    z.grad_fn.register_hook(quietly(act))
    return z


def after_a_module(act: Any, h: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    module = Identity()
    module.register_full_backward_hook(quietly(act))
    return module(y) * w


def before_a_module(act: Any, h: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    module = Identity()
    module.register_full_backward_pre_hook(quietly(act))
    return module(y) * w


def once_a_leaf_has_its_gradient(act: Any, h: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    w.register_post_accumulate_grad_hook(quietly(act))
    return y * w


def in_a_function(act: Any, h: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return Passing.apply(y, act) * w


HOOKS = [
    of_the_result,
    of_the_product,
    of_the_value,
    before_the_node,
    after_the_node,
    after_the_node_before,
    after_a_module,
    before_a_module,
    once_a_leaf_has_its_gradient,
    in_a_function,
]
WAYS: dict[str, Write] = {
    "data": lambda h: h.data.zero_(),
    "data_of_a_part": lambda h: h.data[1:].mul_(3),
    "storage": lambda h: h.untyped_storage().fill_(0),
    "array": lambda h: h.detach().numpy().fill(9),
    "nothing": lambda h: h.data.add_(0),
    "another": lambda h: torch.ones_like(h).data.zero_(),
}


CODES = {"storage": "GS204", "array": "GS203"}


def gradient(hook: Any, write: Write, retains: bool = False, rounds: int = 1) -> torch.Tensor:
    x, w = torch.tensor([1.0, 2.0, 3.0], requires_grad=True), torch.ones(3, requires_grad=True)
    for _ in range(rounds):
        h = x * 2
        loss = hook(lambda h=h: write(h), h, h * h, w).sum()
        loss.backward(retain_graph=retains)
    assert x.grad is not None
    return x.grad


@functools.cache
def right_gradient(hook: Any) -> torch.Tensor:
    return gradient(hook, lambda h: None)


@pytest.fixture(params=["watch", "deep"])
def mode(request: pytest.FixtureRequest) -> Iterator[Any]:
    """On around all cases, each of which is watched by itself: to put wrappers into torch takes longest."""
    for hook in HOOKS:
        right_gradient(hook)
    with gradsan.watch(request.param):
        yield request.param


@each_anew("retains", [False, True])
@each_anew("way", WAYS)
@each_anew("hook", HOOKS)
def test_reported_where_the_gradient_is_another(hook: Any, way: str, retains: bool, mode: Any) -> None:
    right = right_gradient(hook)
    with gradsan.watch(mode) as watched:
        got = gradient(hook, WAYS[way], retains)
    wrong = not torch.equal(got, right)
    # Where the hook of a leaf runs while nothing is let go of, what has run is not known.
    if retains and mode == "watch" and hook is once_a_leaf_has_its_gradient:
        wrong = False
    # A Node asks once which hooks stand before it.
    if way == "array" and mode == "watch" and hook is before_the_node:
        wrong = False
    assert [one.code for one in watched.diagnoses if one.severity == "error"] == (
        [CODES.get(way, "GS202")] if wrong else []
    )
    for one in watched.diagnoses:
        if one.severity == "error":
            assert one.silent
            assert [label.role for label in one.labels if label.role != "note"] == ["saved", "written", "used"]


def test_values_of_another_backward_are_no_finding() -> None:
    x, other = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    with gradsan.watch() as watched:
        h = x * 2
        y, z = h * h, h * other
        z.register_hook(quietly(lambda: h.data.mul_(1)))
        torch.autograd.grad((y + z).sum(), other)
    assert [one for one in watched.diagnoses if one.severity == "error"] == []


def test_gradients_scaled_by_data_cost_no_look() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    for p in net.parameters():
        p.register_hook(lambda g: quietly(lambda: g.data.clamp_(-1, 1))())
    with gradsan.watch() as watched:
        looked = []
        prescan = recorder().watching.run.get(Prescan)
        original = prescan.look_again
        prescan.look_again = lambda *given: looked.append(given)  # type: ignore[method-assign]
        try:
            for _ in range(5):
                net(torch.ones(2, 3)).sum().backward()
        finally:
            prescan.look_again = original  # type: ignore[method-assign]
    assert looked == []
    assert [one for one in watched.diagnoses if one.severity == "error"] == []


@each_anew("retains", [False, True])
@each_anew("hook", HOOKS)
def test_an_array_made_before(hook: Any, retains: bool, mode: Any) -> None:
    right = right_gradient(hook)
    arrays = []

    def keep_array(act: Any, h: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        arrays.append(h.detach().numpy())
        return hook(act, h, y, w)  # type: ignore[no-any-return]

    with gradsan.watch(mode) as watched:
        got = gradient(keep_array, lambda h: arrays[-1].fill(9), retains)
    told = [one.code for one in watched.diagnoses if one.severity == "error"]
    assert told == ([] if torch.equal(got, right) else ["GS203"])
    # Both operands of ``h * h``.
    assert [one.count for one in watched.diagnoses if one.severity == "error"] == [2] * len(told)


def test_nothing_of_a_graph_lives_longer() -> None:
    with gradsan.watch():
        x = torch.ones(3, requires_grad=True)
        h = x * 2
        array = h.detach().numpy()
        y = (h * h).sum()
        y.backward(retain_graph=True)
        array.fill(1)
        alive = weakref.ref(x)
        del x, y, h
        gc.collect()
        assert alive() is None
