"""GS218: updates by gradients that were taken to be differentiated and never were, and all that looks like it."""

from __future__ import annotations

import copy
import functools
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import gradsan
from cases import each
from gradsan.detect.gradients.lost_updates import LostUpdates
from gradsan.record.recorder import recorder

every_mode = pytest.mark.parametrize("mode", ["watch", "deep"])


def begin_anew() -> None:
    """Forget what was logged: lines are known by their stacks, which equal each other in all cases of a test."""
    recorder().core.clear()


rounds_begin_anew = pytest.fixture(autouse=True)(begin_anew)
each_anew = functools.partial(each, before=begin_anew)


def told(watched: Any) -> list[tuple[str, str]]:
    return [(one.code, one.severity) for one in watched.diagnoses]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def loss_of(net: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    return net(torch.randn(5, 3)).sub(1).pow(2).mean()


Inner = Callable[[nn.Module, bool], None]


def by_data(net: nn.Module, again: bool) -> None:
    held = list(net.parameters())
    for p, g in zip(held, torch.autograd.grad(loss_of(net), held, create_graph=again), strict=True):
        p.data -= 0.1 * g.data


def under_no_grad(net: nn.Module, again: bool) -> None:
    grads = torch.autograd.grad(loss_of(net), tuple(net.parameters()), create_graph=again)
    with torch.no_grad():
        for p, g in zip(net.parameters(), grads, strict=True):
            p.sub_(g, alpha=0.1)


def by_new_data(net: nn.Module, again: bool) -> None:
    grads = torch.autograd.grad(loss_of(net), tuple(net.parameters()), create_graph=again)
    for p, g in zip(net.parameters(), grads, strict=True):
        p.data = (p - 0.1 * g).detach()


def by_own_rates(net: nn.Module, again: bool) -> None:
    grads = torch.autograd.grad(loss_of(net), tuple(net.parameters()), create_graph=again)
    with torch.no_grad():
        for p, g in zip(net.parameters(), grads, strict=True):
            p.copy_(p - torch.rand_like(p) * g.clamp(-1, 1))


def by_optimizer(net: nn.Module, again: bool) -> None:
    net.zero_grad()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    loss_of(net).backward(create_graph=again)
    optimizer.step()
    optimizer.zero_grad()


def by_vector(net: nn.Module, again: bool) -> None:
    grads = torch.autograd.grad(loss_of(net), tuple(net.parameters()), create_graph=again)
    vector_to_parameters(parameters_to_vector(net.parameters()) - 0.1 * parameters_to_vector(grads), net.parameters())


def by_state(net: nn.Module, again: bool) -> None:
    grads = torch.autograd.grad(loss_of(net), tuple(net.parameters()), create_graph=again)
    named = zip(net.named_parameters(), grads, strict=True)
    net.load_state_dict({name: p - 0.1 * g for (name, p), g in named})


def all_at_once(net: nn.Module, again: bool) -> None:
    held = list(net.parameters())
    grads = torch.autograd.grad(loss_of(net), held, create_graph=again)
    with torch.no_grad():
        torch._foreach_sub_(held, torch._foreach_mul(grads, 0.1))


INNER = [by_data, under_no_grad, by_new_data, by_own_rates, by_optimizer, by_vector, by_state, all_at_once]


def restored(net: nn.Module, inner: Inner, again: bool, tasks: int = 2, steps: int = 1) -> None:
    for _ in range(tasks):
        kept = [p.detach().clone() for p in net.parameters()]
        for _ in range(steps):
            inner(net, again)
        loss_of(net).backward()
        with torch.no_grad():
            for p, k in zip(net.parameters(), kept, strict=True):
                p.copy_(k)


def restored_from_state(net: nn.Module, inner: Inner, again: bool) -> None:
    meta = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(3):
        meta.zero_grad()
        kept = copy.deepcopy(net.state_dict())
        inner(net, again)
        loss_of(net).backward()
        net.load_state_dict(kept)
        meta.step()


def in_a_copy(net: nn.Module, inner: Inner, again: bool) -> None:
    for _ in range(3):
        learner = copy.deepcopy(net)
        inner(learner, again)
        loss_of(learner).backward()


OUTER = [restored, restored_from_state, in_a_copy]


@every_mode
@each_anew("inner", INNER)
@each_anew("outer", OUTER)
@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True")
def test_an_inner_step_past_the_graph(outer: Any, inner: Any, mode: str) -> None:
    with gradsan.watch(mode) as watched:
        outer(network(), inner, True)
    assert told(watched) == [("GS218", "warning")]
    (one,) = watched.diagnoses
    assert one.silent
    assert [label.role for label in one.labels] == ["note", "written", "used"]


@every_mode
@each_anew("inner", INNER)
@each_anew("outer", OUTER)
def test_a_first_order_method(outer: Any, inner: Any, mode: str) -> None:
    with gradsan.watch(mode) as watched:
        outer(network(), inner, False)
    assert told(watched) == []


@each_anew("steps", [2, 3, 5, 8])
def test_several_inner_steps(steps: int) -> None:
    with gradsan.watch() as watched:
        restored(network(), by_data, True, tasks=3, steps=steps)
    assert told(watched) == [("GS218", "warning")]


def test_gradients_that_are_still_held_when_watching_ends() -> None:
    net, kept = network(), []
    with gradsan.watch() as watched:
        for _ in range(2):
            grads = torch.autograd.grad(loss_of(net), tuple(net.parameters()), create_graph=True)
            kept.append(grads)
            with torch.no_grad():
                for p, g in zip(net.parameters(), grads, strict=True):
                    p -= 0.1 * g
            loss_of(net).backward()
    assert told(watched) == [("GS218", "warning")]


def test_once_is_a_note() -> None:
    w = torch.tensor([1.0], requires_grad=True)
    with gradsan.watch() as watched:
        (g,) = torch.autograd.grad(w.pow(3).sum(), w, create_graph=True)
        w.data -= 0.1 * g.data
        w.pow(2).sum().backward()
    assert told(watched) == [("GS218", "note")]


def differentiable_inner_steps() -> None:
    net = network()
    rates = [torch.full_like(p, 0.05).requires_grad_() for p in net.parameters()]
    meta = torch.optim.Adam([*net.parameters(), *rates])
    for _ in range(4):
        fast = dict(net.named_parameters())
        for _ in range(2):
            loss = loss_of(lambda x, fast=fast: functional_call(net, fast, (x,)))
            grads = torch.autograd.grad(loss, list(fast.values()), create_graph=True)
            fast = {name: p - r * g for (name, p), r, g in zip(fast.items(), rates, grads, strict=True)}
        meta.zero_grad()
        loss_of(lambda x, fast=fast: functional_call(net, fast, (x,))).backward()
        meta.step()


def second_order_by_hand() -> None:
    net = network()
    for _ in range(4):
        held = list(net.parameters())
        fast = [p.detach().clone().requires_grad_() for p in held]
        names = [name for name, _ in net.named_parameters()]
        x = torch.randn(5, 3)
        grads = torch.autograd.grad(net(x).pow(2).mean(), held, create_graph=True)
        with torch.no_grad():
            for p, g in zip(fast, grads, strict=True):
                p -= 0.1 * g
        query = functional_call(net, dict(zip(names, fast, strict=True)), (x,)).pow(2).mean()
        outer = torch.autograd.grad(query, fast)
        back = torch.autograd.grad(grads, held, [-0.1 * v for v in outer])
        with torch.no_grad():
            for p, v, b in zip(held, outer, back, strict=True):
                p -= 0.1 * (v + b)


def hessian_free_steps_that_are_lazy() -> None:
    net = network()
    held = list(net.parameters())
    for number in range(9):
        grads = torch.autograd.grad(loss_of(net), held, create_graph=number % 2 == 0)
        if number % 4 == 0:
            torch.autograd.grad(grads, held, [torch.ones_like(g) for g in grads])
        with torch.no_grad():
            for p, g in zip(held, grads, strict=True):
                p -= 0.1 * g


def descent_with_a_needless_graph() -> None:
    w = torch.randn(4, requires_grad=True)
    for _ in range(20):
        (g,) = torch.autograd.grad((w - 1).pow(4).sum(), w, create_graph=True)
        with torch.no_grad():
            w -= 0.01 * g


def reptile_with_a_needless_graph() -> None:
    net = network()
    for _ in range(4):
        kept = copy.deepcopy(net.state_dict())
        for _ in range(3):
            by_data(net, True)
        moved = net.state_dict()
        net.load_state_dict({name: k + 0.5 * (moved[name] - k) for name, k in kept.items()})


def evaluation_of_a_meta_learner() -> None:
    net = network()
    for _ in range(4):
        learner = copy.deepcopy(net)
        by_data(learner, True)
        with torch.no_grad():
            loss_of(learner)


def gradient_penalty() -> None:
    net = network()
    optimizer = torch.optim.Adam(net.parameters())
    for _ in range(9):
        x = torch.randn(5, 3, requires_grad=True)
        (g,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
        optimizer.zero_grad()
        (loss_of(net) + (g.norm(dim=1) - 1).pow(2).mean()).backward()
        optimizer.step()
        with torch.no_grad():
            for p in net.parameters():
                p.clamp_(-1, 1)


def penalty_in_a_step_of_its_own() -> None:
    net = network()
    held = list(net.parameters())
    optimizer = torch.optim.SGD(held, lr=0.1)
    for _ in range(9):
        grads = torch.autograd.grad(loss_of(net), held, create_graph=True)
        optimizer.zero_grad()
        sum(g.pow(2).sum() for g in grads).backward()
        optimizer.step()
        optimizer.zero_grad()
        loss_of(net).backward()
        optimizer.step()


def attack_that_climbs() -> None:
    net, delta = network(), torch.zeros(5, 3, requires_grad=True)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(9):
        (g,) = torch.autograd.grad(net(torch.ones(5, 3) + delta).pow(2).mean(), delta, create_graph=True)
        delta.data += 0.1 * g.sign()
        delta.data.clamp_(-0.3, 0.3)
        optimizer.zero_grad()
        F.mse_loss(net(torch.ones(5, 3) + delta), torch.zeros(5, 1)).backward()
        optimizer.step()


def transforms() -> None:
    net = network()
    values = {name: p.detach() for name, p in net.named_parameters()}
    for _ in range(5):
        x = torch.randn(5, 3)
        grads = torch.func.grad(lambda v, x=x: functional_call(net, v, (x,)).pow(2).mean())(values)
        with torch.no_grad():
            for name, g in grads.items():
                values[name] -= 0.1 * g
        loss_of(net).backward()


def curvature_by_random_vectors() -> None:
    net = network()
    held = list(net.parameters())
    for _ in range(9):
        grads = torch.autograd.grad(loss_of(net), held, create_graph=True)
        curvature = torch.autograd.grad(grads, held, [torch.randint_like(p, 2) * 2 - 1 for p in held])
        with torch.no_grad():
            for p, g, c in zip(held, grads, curvature, strict=True):
                p -= 0.01 * g / (c.abs() + 1)
        loss_of(net).backward()


def norm_of_gradients_on_the_way() -> None:
    net = network()
    held = list(net.parameters())
    optimizer = torch.optim.SGD(held, lr=0.1)
    for _ in range(9):
        norms = [g.detach().norm() for g in torch.autograd.grad(loss_of(net), held, create_graph=True)]
        optimizer.zero_grad()
        (loss_of(net) / torch.stack(norms).max()).backward()
        optimizer.step()


def gradients_taken_once_more_to_be_logged() -> None:
    net = network()
    held = list(net.parameters())
    optimizer = torch.optim.SGD(held, lr=0.1)
    norms = []
    for number in range(9):
        loss = loss_of(net)
        optimizer.zero_grad()
        loss.backward(retain_graph=True)
        norms += [g.detach().norm() for g in torch.autograd.grad(loss, held, create_graph=True)]
        if number % 2:
            optimizer.step()
        else:
            with torch.no_grad():
                for p in held:
                    p -= 0.1 * p.grad


RIGHT = [
    gradients_taken_once_more_to_be_logged,
    curvature_by_random_vectors,
    norm_of_gradients_on_the_way,
    differentiable_inner_steps,
    second_order_by_hand,
    hessian_free_steps_that_are_lazy,
    descent_with_a_needless_graph,
    reptile_with_a_needless_graph,
    evaluation_of_a_meta_learner,
    gradient_penalty,
    penalty_in_a_step_of_its_own,
    attack_that_climbs,
    transforms,
]


@every_mode
@each_anew("training", RIGHT)
def test_right_and_harmless_programs_are_quiet(training: Any, mode: str) -> None:
    torch.manual_seed(0)
    with gradsan.watch(mode) as watched:
        training()
    assert told(watched) == []


def test_no_graph_and_no_leaf_lives_longer() -> None:
    with gradsan.watch():
        net = network()
        p = next(iter(net.parameters()))
        (g,) = torch.autograd.grad(loss_of(net), p, create_graph=True)
        saved, leaf = weakref.ref(g), weakref.ref(p)
        with torch.no_grad():
            p -= 0.1 * g
        del g
        assert saved() is None
        loss_of(net).backward()
        del p, net
        gc.collect()
        assert leaf() is None


def test_nothing_listens_once_all_is_settled() -> None:
    with gradsan.watch():
        net = network()
        for _ in range(3):
            loss_of(net).backward()
        before = recorder().listeners.before_backward
        restored(net, by_data, True)
        for _ in range(2):
            loss_of(net).backward()
        listener = recorder().watching.run.get(LostUpdates).before_backward
        assert listener not in before
        assert listener not in recorder().listeners.before_backward
