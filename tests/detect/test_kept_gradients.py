"""GS214: a gradient that nobody clears while its leaf is updated, and everything that looks like it and is none."""

from __future__ import annotations

import functools
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gradsan
from cases import each
from gradsan.record.recorder import recorder

every_mode = pytest.mark.parametrize("mode", ["watch", "deep"])


def begin_anew() -> None:
    """Forget what was logged: lines are known by their stacks, which equal each other in all cases of a test."""
    recorder().core.clear()


rounds_begin_anew = pytest.fixture(autouse=True)(begin_anew)
each_anew = functools.partial(each, before=begin_anew)


def told(watched: Any) -> list[tuple[str, str | None]]:
    return [
        (one.code, None if one.tensor is None else one.tensor.name)
        for one in watched.diagnoses
        if one.severity != "note"
    ]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def by_data(delta: torch.Tensor) -> None:
    delta.data = (delta.data + delta.grad.sign()).clamp(-1, 1)


def by_data_in_place(delta: torch.Tensor) -> None:
    delta.data.add_(delta.grad.sign())


def by_data_augmented(delta: torch.Tensor) -> None:
    delta.data += 0.1 * delta.grad


def under_no_grad(delta: torch.Tensor) -> None:
    with torch.no_grad():
        delta += 0.1 * delta.grad
        delta.clamp_(-1, 1)


def by_copy(delta: torch.Tensor) -> None:
    with torch.no_grad():
        delta.copy_(delta + 0.1 * delta.grad)


def by_slice(delta: torch.Tensor) -> None:
    with torch.no_grad():
        delta[1:] = delta[1:] - delta.grad[1:]


HAND = [by_data, by_data_in_place, by_data_augmented, under_no_grad, by_copy, by_slice]


def attack(update: Callable[[torch.Tensor], None], rounds: int, clear: Callable[[torch.Tensor], None] | None) -> None:
    net, x = network(), torch.ones(2, 3)
    delta = torch.zeros(2, 3, requires_grad=True)
    for _ in range(rounds):
        loss = net(x + delta).pow(2).sum()
        loss.backward()
        update(delta)
        if clear is not None:
            clear(delta)
            net.zero_grad()


@every_mode
@each_anew("update", HAND)
def test_an_attack_that_never_clears(update: Any, mode: str) -> None:
    with gradsan.watch(mode) as watched:
        attack(update, 4, None)
    assert told(watched) == [("GS214", "delta.grad")]
    (one,) = watched.diagnoses
    assert one.silent
    assert one.severity == "warning"
    assert {label.role for label in one.labels} == {"used", "written"}


def to_none(delta: torch.Tensor) -> None:
    delta.grad = None


def zeroed(delta: torch.Tensor) -> None:
    delta.grad.zero_()


def zeroed_by_data(delta: torch.Tensor) -> None:
    delta.grad.data.zero_()


def filled(delta: torch.Tensor) -> None:
    delta.grad.fill_(0)


def multiplied(delta: torch.Tensor) -> None:
    delta.grad *= 0.9


def subtracted(delta: torch.Tensor) -> None:
    torch.sub(delta.grad, delta.grad, out=delta.grad)


def assigned(delta: torch.Tensor) -> None:
    delta.grad[...] = 0


def new_zeros(delta: torch.Tensor) -> None:
    delta.grad = torch.zeros_like(delta)


def in_a_list(delta: torch.Tensor) -> None:
    torch._foreach_zero_([delta.grad])


@every_mode
@each_anew("clear", [to_none, zeroed, zeroed_by_data, filled, multiplied, subtracted, assigned, new_zeros, in_a_list])
def test_an_attack_that_clears(clear: Any, mode: str) -> None:
    with gradsan.watch(mode) as watched:
        attack(by_data, 20, clear)
        attack(under_no_grad, 20, clear)
    assert told(watched) == []


@each_anew("rounds", [1, 2, 3])
def test_a_few_rounds_prove_nothing(rounds: int) -> None:
    with gradsan.watch() as watched:
        attack(by_data, rounds, None)
    assert told(watched) == []


def test_reported_once_however_long_it_goes_on() -> None:
    with gradsan.watch() as watched:
        attack(by_data, 40, None)
    assert [one.count for one in watched.diagnoses if one.code == "GS214"] == [1]


OPTIMIZERS: list[Callable[[Any], torch.optim.Optimizer]] = [
    lambda held: torch.optim.SGD(held, lr=0.1),
    lambda held: torch.optim.SGD(held, lr=0.1, foreach=False),
    lambda held: torch.optim.SGD(held, lr=0.1, momentum=0.9, weight_decay=0.1),
    lambda held: torch.optim.Adam(held, lr=0.1),
    lambda held: torch.optim.Adam(held, lr=0.1, fused=True),
    lambda held: torch.optim.Adadelta(held),
]


@every_mode
@each_anew("make", OPTIMIZERS)
def test_a_training_that_forgets_zero_grad(make: Any, mode: str) -> None:
    net = network()
    optimizer = make(net.parameters())
    with gradsan.watch(mode) as watched:
        for _ in range(5):
            net(torch.ones(2, 3)).pow(2).sum().backward()
            optimizer.step()
    assert told(watched) == [("GS214", "net.0.weight.grad")]
    (note,) = watched.diagnoses[0].notes
    assert note.values["others"] == 3


@every_mode
@each_anew("make", OPTIMIZERS)
@each_anew("to_none", [True, False])
def test_a_training_that_clears(make: Any, to_none: bool, mode: str) -> None:
    net = network()
    optimizer = make(net.parameters())
    with gradsan.watch(mode) as watched:
        for _ in range(9):
            optimizer.zero_grad(set_to_none=to_none)
            net(torch.ones(2, 3)).pow(2).sum().backward()
            optimizer.step()
    assert told(watched) == []


@each_anew("clip", [nn.utils.clip_grad_norm_, nn.utils.clip_grad_value_])
def test_clipping_is_no_clearing(clip: Any) -> None:
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with gradsan.watch() as watched:
        for _ in range(5):
            net(torch.ones(2, 3)).pow(2).sum().backward()
            clip(net.parameters(), 0.1)
            optimizer.step()
    assert told(watched) == [("GS214", "net.0.weight.grad")]


@every_mode
@each_anew("every", [2, 3, 4, 5, 8])
@each_anew("to_none", [True, False])
def test_gradients_accumulated_on_purpose(every: int, to_none: bool, mode: str) -> None:
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with gradsan.watch(mode) as watched:
        for number in range(1, 33):
            (net(torch.ones(2, 3)).pow(2).sum() / every).backward()
            if number % every == 0:
                optimizer.step()
                optimizer.zero_grad(set_to_none=to_none)
    assert told(watched) == []


def test_weights_kept_within_bounds_while_gradients_accumulate() -> None:
    torch.manual_seed(0)
    words, head = nn.Embedding(5, 3, max_norm=0.5), nn.Linear(3, 1)
    held = [*words.parameters(), *head.parameters()]
    optimizer = torch.optim.SGD(held, lr=0.1)
    with gradsan.watch() as watched:
        for number in range(1, 17):
            head(words(torch.tensor([number % 5, 1]))).pow(2).sum().backward()
            head.weight.data.clamp_(-1, 1)
            if number % 8 == 0:
                optimizer.step()
                optimizer.zero_grad()
    assert told(watched) == []


def test_gradients_of_several_tasks_are_added_up() -> None:
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    held = list(net.parameters())
    with gradsan.watch() as watched:
        for _ in range(8):
            backup = [one.detach().clone() for one in held]
            inner = torch.autograd.grad(net(torch.ones(2, 3)).pow(2).sum(), held)
            for one, gradient in zip(held, inner, strict=True):
                one.data -= 0.1 * gradient
            net(torch.ones(2, 3)).pow(2).sum().backward()
            for one, value in zip(held, backup, strict=True):
                one.data.copy_(value)
        optimizer.step()
    assert told(watched) == []


def test_a_leaf_that_is_not_updated() -> None:
    net, x = network(), torch.ones(2, 3, requires_grad=True)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with gradsan.watch() as watched:
        for _ in range(9):
            optimizer.zero_grad()
            net(x).pow(2).sum().backward()
            optimizer.step()
    assert told(watched) == []


def test_two_networks_that_play_against_each_other() -> None:
    torch.manual_seed(0)
    maker, judge = nn.Linear(2, 3), nn.Linear(3, 1)
    of_maker, of_judge = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (maker, judge))
    with gradsan.watch() as watched:
        for _ in range(9):
            made = maker(torch.ones(4, 2))
            of_judge.zero_grad(set_to_none=False)
            judge(made.detach()).pow(2).mean().backward()
            of_judge.step()
            of_maker.zero_grad(set_to_none=False)
            (1 - judge(made)).pow(2).mean().backward()
            of_maker.step()
    assert told(watched) == []


def test_closures_clear_what_they_compute() -> None:
    net = network()
    optimizer = torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=5)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = net(torch.ones(2, 3)).pow(2).sum()
        loss.backward()
        return loss

    with gradsan.watch() as watched:
        for _ in range(3):
            optimizer.step(closure)
    assert told(watched) == []


def test_the_line_whose_backward_reaches_the_leaf_is_shown() -> None:
    first, second = network(), network()
    optimizer = torch.optim.SGD(first.parameters(), lr=0.1)
    with gradsan.watch() as watched:
        for _ in range(5):
            second(torch.ones(2, 3)).sum().backward()
            first(torch.ones(2, 3)).sum().backward()
            optimizer.step()
            second.zero_grad()
    (one,) = (one for one in watched.diagnoses if one.code == "GS214")
    (used,) = (label for label in one.labels if label.role == "used")
    assert "first(" in Path(used.frame.file).read_text().splitlines()[used.frame.line - 1]


def test_a_leaf_that_is_cleared_half_way() -> None:
    with gradsan.watch() as watched:
        attack(by_data, 20, _every_third(zeroed))
    assert told(watched) == []


def _every_third(clear: Callable[[torch.Tensor], None]) -> Callable[[torch.Tensor], None]:
    numbers: Iterator[int] = iter(range(1, 1_000))
    return lambda delta: clear(delta) if next(numbers) % 3 == 0 else None


def test_gradients_that_are_zero_add_nothing() -> None:
    w = torch.ones(3, requires_grad=True)
    optimizer = torch.optim.SGD([w], lr=0.1, weight_decay=0.1)
    with gradsan.watch() as watched:
        for _ in range(9):
            (w * 0).sum().backward()
            optimizer.step()
    assert told(watched) == []


def test_no_leaf_and_no_gradient_is_kept_alive() -> None:
    kept = []

    def run() -> None:
        delta = torch.zeros(2, 3, requires_grad=True)
        kept.append(weakref.ref(delta))
        for _ in range(3):
            (delta * 2).sum().backward()
            delta.data.add_(delta.grad)
        kept.append(weakref.ref(delta.grad))

    with gradsan.watch():
        run()
        gc.collect()
        assert [one() for one in kept] == [None, None]


class Shy(torch.Tensor):
    """A leaf that notes when its gradient is read."""

    reads = 0

    @property
    def grad(self) -> Any:
        Shy.reads += 1
        return torch.ones(3)


def test_gradients_of_other_threads_are_left_alone() -> None:
    """The engine may set one in its thread while it is read here, and that can end the process."""
    shy = torch.ones(3).as_subclass(Shy).requires_grad_()
    idle = threading.Event()
    other = threading.Thread(target=idle.wait)
    other.start()
    Shy.reads = 0
    try:
        with gradsan.watch() as watched:
            attack(by_data, 12, None)
    finally:
        idle.set()
        other.join()
    assert told(watched) == [("GS214", "delta.grad")]
    assert Shy.reads == 0
    assert shy.is_leaf


def test_another_thread_that_calls_backward_and_lives() -> None:
    called, idle = threading.Event(), threading.Event()

    def call() -> None:
        torch.ones(3, requires_grad=True).sum().backward()
        called.set()
        idle.wait()

    other = threading.Thread(target=call)
    with gradsan.watch() as watched:
        other.start()
        called.wait()
        attack(by_data, 12, None)
    idle.set()
    other.join()
    assert told(watched) == []


def test_another_thread_that_has_called_backward_and_ended() -> None:
    other = threading.Thread(target=lambda: torch.ones(3, requires_grad=True).sum().backward())
    with gradsan.watch() as watched:
        other.start()
        other.join()
        attack(by_data, 12, None)
    assert told(watched) == [("GS214", "delta.grad")]
