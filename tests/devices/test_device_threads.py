"""Backward in the engine's own threads: whose call it is, which names its tensors have, who wrote in a hook."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import torch
from torch import nn

import gradsan
from gradsan.record.recorder import recorder
from gradsan.record.steps import running_here


def lines(diagnosis: Any) -> list[tuple[str, Any]]:
    return [(label.role, label.frame and label.frame.line) for label in diagnosis.labels]


def places(diagnosis: Any) -> dict[str, str]:
    return {label.role: label.frame.function.rpartition(".")[2] for label in diagnosis.labels if label.frame}


def overwritten(device: str) -> tuple[Any, Any]:
    weight = torch.tensor([0.5, 1.0], requires_grad=True, device=device)
    hidden = weight * 2
    loss = hidden.square().sum()
    hidden.data.add_(1)
    return weight, loss


def test_deep_mode_names_what_the_calling_thread_holds(device: str) -> None:
    with gradsan.watch("deep") as watched:
        weight, loss = overwritten(device)
        hidden_elsewhere = weight
        loss.backward()
    [found] = watched.diagnoses
    assert hidden_elsewhere is weight
    assert found.gradient.status == "wrong"
    assert found.gradient.relative_error is not None
    assert found.tensor.device == device


def test_names_of_the_calling_thread(device: str) -> None:
    with gradsan.watch("deep") as watched:
        weight = torch.tensor([0.5, 1.0], requires_grad=True, device=device)
        hidden = weight * 2
        loss = hidden.square().sum()
        hidden.data.add_(1)
        loss.backward()
    [found] = watched.diagnoses
    assert found.tensor.name == "hidden"
    assert places(found)["used"] == "test_names_of_the_calling_thread"


def on_the_first(loss: Any) -> None:
    loss.backward()


def on_the_second(loss: Any) -> None:
    loss.backward(retain_graph=True)


def test_two_devices_at_once_each_work_for_the_call_that_waits_for_them(device: str, second: str) -> None:
    barrier, errors, calls = threading.Barrier(2), list[BaseException](), dict[str, Any]()

    def train(device: str, backward: Any) -> None:
        out = torch.tensor([0.5, 1.0], requires_grad=True, device=device).square()

        def look(_: Any) -> None:
            barrier.wait(30)
            calls[device] = running_here(recorder().core)[1].codes
            barrier.wait(30)

        out.register_hook(look)
        try:
            backward(out.sum())
        except (RuntimeError, threading.BrokenBarrierError) as error:
            errors.append(error)

    with gradsan.watch():
        pairs = ((device, on_the_first), (second, on_the_second))
        threads = [threading.Thread(target=train, args=pair) for pair in pairs]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
    assert errors == []
    assert {name: [code for code in codes if code.co_name.startswith("on_the")] for name, codes in calls.items()} == {
        device: [on_the_first.__code__],
        second: [on_the_second.__code__],
    }


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


def test_a_functions_backward_in_another_thread(device: str) -> None:
    with gradsan.watch("deep") as watched:
        x = torch.tensor([0.5, 1.0], requires_grad=True, device=device)
        y = x * 1
        loss = Doubled.apply(y).sum()
        y.data.mul_(2)
        loss.backward()
    [found] = watched.diagnoses
    assert found.tensor.name == "y"


def doubling(device: str) -> list[tuple[str, Any]]:
    """A hook writes the gradient that another branch gets, too."""

    def doubled(gradient: Any) -> None:
        gradient.mul_(2)

    with gradsan.watch() as watched:
        x = torch.tensor([0.5, 1.0], requires_grad=True, device=device)
        y = x * 1
        y.register_hook(doubled)
        (y + x).square().sum().backward()
    return [(one.code, lines(one)) for one in watched.diagnoses]


def test_a_hook_that_writes_the_gradient_it_was_given(device: str) -> None:
    found = doubling("cpu")
    assert len(found) == 1
    assert doubling(device) == found


def hook_that_writes(device: str) -> list[tuple[str, str | None]]:
    """A hook writes past the counter what a Node that has not run yet has saved."""
    with gradsan.watch() as watched:
        weight = torch.tensor([0.5, 1.0], requires_grad=True, device=device)
        scale = torch.tensor([2.0, 3.0], device=device)
        hidden = weight * scale
        hidden.register_hook(lambda _: (scale.data.fill_(0), None)[1])
        loss = hidden.square().sum()
        loss.backward()
    return [(one.code, one.tensor.name if one.tensor else None) for one in watched.diagnoses]


def test_a_hook_that_writes_past_the_counter(device: str) -> None:
    found = hook_that_writes("cpu")
    assert [code for code, _ in found] == ["GS202"]
    assert hook_that_writes(device) == found


def penalised(device: str, mode: Any) -> list[tuple[str, Any]]:
    """A value that the first backward, with create_graph, has saved is overwritten before the second one."""
    torch.manual_seed(0)
    with gradsan.watch(mode) as watched:
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).to(device)
        x = torch.ones(2, 3, device=device, requires_grad=True)
        for _ in range(3):
            filler = (x * 2).exp().sin().cos().sum()
        (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        penalty = (gradient.square().sum(1).sqrt() - 1).square().mean()
        with torch.no_grad():
            model[0].weight.add_(1)
        with contextlib.suppress(RuntimeError):
            (penalty + 0 * filler).backward()
    return [(one.code, one.severity, lines(one)) for one in watched.diagnoses]


def test_a_value_that_an_earlier_backward_has_saved(device: str) -> None:
    for mode in ("watch", "deep"):
        assert penalised(device, mode) == penalised("cpu", mode)
