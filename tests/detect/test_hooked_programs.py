"""Programs with hooks, offloading, checkpoint, Functions, transforms: findings for the wrong ones only.

Each runs plain first; under gradsan it computes the same bits and calls what it calls as often.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.func import functional_call, grad, jacrev, vmap
from torch.utils.checkpoint import checkpoint

import gradsan
from cases import each


class Program(NamedTuple):
    run: Callable[[], list[Any]]
    is_wrong: bool


PROGRAMS: dict[str, Program] = {}


def program(is_wrong: bool) -> Callable[[Callable[[], list[Any]]], Any]:
    def add(run: Callable[[], list[Any]]) -> None:
        PROGRAMS[run.__name__] = Program(run, is_wrong)

    return add


RIGHT, WRONG = program(is_wrong=False), program(is_wrong=True)


def leaf(*shape: int) -> torch.Tensor:
    return torch.randn(shape, requires_grad=True)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(x: torch.Tensor, factor: float) -> torch.Tensor:
        return x * x * factor

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.save_for_backward(inputs[0])
        ctx.factor = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (x,) = ctx.saved_tensors
        return 2 * x * ctx.factor * grad, None

    @staticmethod
    def vmap(info: Any, dims: Any, x: torch.Tensor, factor: float) -> Any:
        return Square.apply(x, factor), dims[0]


@RIGHT
def a_hook_that_logs_and_scales() -> list[Any]:
    seen: list[torch.Tensor] = []
    x = leaf(3)
    y = x.exp()
    y.register_hook(lambda g: (seen.append(g.clone()), g * 0.5)[1])
    (y * y).sum().backward()
    return [x.grad, len(seen), *seen]


@RIGHT
def a_hook_that_edits_another_grad() -> list[Any]:
    x, w = leaf(3), leaf(3)
    w.grad = torch.zeros(3)
    y = x * w
    y.register_hook(lambda g: (w.grad.add_(1), None)[1])
    y.sum().backward()
    return [x.grad, w.grad]


@RIGHT
def copies_outlive_what_they_copy() -> list[Any]:
    x = leaf(4)
    t = x * 2
    with saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        z = (t * t).sum()
    t.data.zero_()
    z.backward()
    return [x.grad]


@RIGHT
def a_training_under_save_on_cpu() -> list[Any]:
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.RReLU(inplace=True), nn.Flatten(), nn.Linear(18, 1))
    optimizer = torch.optim.SGD(net.parameters(), 0.1, fused=True)
    seen: list[Any] = []
    for _ in range(3):
        optimizer.zero_grad()
        with save_on_cpu():
            loss = net(torch.randn(2, 1, 5, 5)).square().sum()
        loss.backward()
        optimizer.step()
        seen.append(loss.detach())
    return seen


def stepped_between(**options: Any) -> list[Any]:
    first, second = nn.Linear(4, 4), nn.Linear(4, 1)
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], 0.1, **options)
    with save_on_cpu():
        loss = second(first(torch.randn(2, 4)).tanh()).sum()
    loss.backward(retain_graph=True)
    optimizer.step()
    loss.backward()
    return [one.grad for one in first.parameters()]


@WRONG
def a_step_under_save_on_cpu() -> list[Any]:
    return stepped_between()


@WRONG
def a_fused_step_under_save_on_cpu() -> list[Any]:
    return stepped_between(fused=True)


def sliced(written: slice) -> list[Any]:
    x = leaf(4)
    t = x * 2
    with save_on_cpu():
        z = (t[:2] * t[:2]).sum()
    t.data[written].zero_()
    z.backward()
    return [x.grad]


@RIGHT
def other_elements_under_save_on_cpu() -> list[Any]:
    return sliced(slice(2, None))


@WRONG
def overlapping_elements_under_save_on_cpu() -> list[Any]:
    return sliced(slice(1, None))


@WRONG
def an_array_under_save_on_cpu() -> list[Any]:
    array = torch.ones(3).numpy().copy()
    x = leaf(3)
    with save_on_cpu():
        loss = (x * torch.from_numpy(array)).sum()
    array[:] = 5
    loss.backward()
    return [x.grad]


@WRONG
def written_between_two_backwards() -> list[Any]:
    x = leaf(3)
    t = x * 2
    with save_on_cpu():
        y = (t * t).sum()
    y.backward(retain_graph=True)
    t.data.mul_(2)
    y.backward()
    return [x.grad]


@RIGHT
def hooks_within_hooks() -> list[Any]:
    x = leaf(4)
    with save_on_cpu():
        with saved_tensors_hooks(lambda t: t.double(), lambda t: t.float()):
            y = x.exp()
        z = (y * y).sum()
    z.backward()
    return [x.grad]


@RIGHT
def an_unpack_hook_that_takes_away() -> list[Any]:
    kept: dict[int, torch.Tensor] = {}
    x = leaf(3)

    def pack(tensor: torch.Tensor) -> int:
        kept[len(kept)] = tensor.detach().clone()
        return len(kept) - 1

    with saved_tensors_hooks(pack, kept.pop):
        y = x.exp().sin()
    y.sum().backward()
    return [x.grad, len(kept)]


def checkpointed(**options: Any) -> list[Any]:
    calls: list[int] = []
    layer, x = nn.Linear(4, 4), leaf(2, 4)
    x.register_hook(lambda g: (calls.append(1), g * 2)[1])
    y = checkpoint(lambda a: (calls.append(2), layer(a).relu_().exp())[1], x, **options)
    (y * y).sum().backward()
    return [x.grad, layer.weight.grad, calls]


@RIGHT
def a_checkpoint() -> list[Any]:
    return checkpointed(use_reentrant=False)


@RIGHT
def a_reentrant_checkpoint() -> list[Any]:
    return checkpointed(use_reentrant=True)


@WRONG
def a_stale_value_beside_a_checkpoint() -> list[Any]:
    x, calls = leaf(2, 4), []
    k = x.exp()
    y = checkpoint(lambda a: (calls.append(1), a.exp().sin())[1], x * 2, use_reentrant=False)
    squares = (k * k).sum()
    k.data.mul_(2)
    (y.sum() + squares).backward()
    return [x.grad, calls]


@RIGHT
def a_checkpoint_within_save_on_cpu() -> list[Any]:
    layer, x = nn.Linear(4, 4), leaf(2, 4)
    with save_on_cpu():
        y = checkpoint(lambda a: layer(a).tanh(), layer(x), use_reentrant=False)
    y.sum().backward()
    return [x.grad]


@RIGHT
def a_function_differentiated_twice() -> list[Any]:
    x = leaf(3)
    (slope,) = torch.autograd.grad(Square.apply(x.exp(), 2.0).sum(), x, create_graph=True)
    slope.register_hook(lambda g: g * 1)
    slope.pow(2).sum().backward()
    return [x.grad]


@WRONG
def a_stale_value_of_a_function() -> list[Any]:
    x = leaf(3)
    t = x.exp()
    y = Square.apply(t, 3.0)
    t.data.mul_(2)
    y.sum().backward()
    return [x.grad]


@WRONG
def a_stale_value_differentiated_twice() -> list[Any]:
    x = leaf(3)
    t = x * 2
    (slope,) = torch.autograd.grad((t**3).sum(), x, create_graph=True)
    t.data.mul_(3)
    slope.pow(2).sum().backward()
    return [x.grad]


@RIGHT
def transforms() -> list[Any]:
    net, x = nn.Linear(3, 1), torch.randn(5, 3)
    parameters = dict(net.named_parameters())
    loss = lambda p, a: functional_call(net, p, (a,)).sum()  # noqa: E731
    each = vmap(grad(loss), (None, 0))(parameters, x)
    return [*each.values(), jacrev(torch.exp)(x[0]), vmap(lambda a: Square.apply(a, 2.0))(x)]


@WRONG
def written_after_vmap() -> list[Any]:
    x = leaf(4, 3)
    t = x * 2
    y = vmap(lambda a: a * a)(t)
    t.data.zero_()
    y.sum().backward()
    return [x.grad]


@WRONG
def gradients_of_inner_tensors() -> list[Any]:
    x = leaf(3)
    t = x * 2
    u = t.exp()
    y = (u * u).sum()
    u.data.mul_(5)
    return list(torch.autograd.grad(y, [t, u, x]))


def is_same(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if torch.is_tensor(one) else bool(one == other)


@pytest.mark.filterwarnings("ignore")
@each("mode", ["watch", "deep", "heal"])
@each("name", PROGRAMS)
def test_right_ones_are_quiet_and_wrong_ones_reported(name: str, mode: Any) -> None:
    torch.manual_seed(0)
    plain = PROGRAMS[name].run()
    torch.manual_seed(0)
    with gradsan.watch(mode) as watched:
        seen = PROGRAMS[name].run()
    told = any(one.severity != "note" for one in watched.diagnoses)
    assert told == PROGRAMS[name].is_wrong
    if mode != "heal" or not PROGRAMS[name].is_wrong:
        assert all(map(is_same, seen, plain))
    assert not any(spot.key == "blind.collect_failed" for spot in watched.report.seen.blind_spots)
