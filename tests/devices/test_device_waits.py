"""Watch mode on a device: no wait and no kernel besides the program's own.

The simulated device counts kernels by name, copies, waits and allocations; each program runs plain and watched.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gradsan
from cases import each

STEPS = 20


@pytest.fixture(autouse=True)
def only_where_it_is_counted(device: str) -> None:
    if not device.startswith("simulated"):
        pytest.skip("only the simulated device counts what it is asked for")


def model_on(device: str) -> Any:
    torch.manual_seed(0)
    layers = nn.Linear(8, 16), nn.Tanh(), nn.BatchNorm1d(16), nn.Linear(16, 4)
    return nn.Sequential(*layers).to(device), torch.randn(4, 8).to(device)


def stepping(kind: str, **options: Any) -> Callable[[str], None]:
    def train(device: str) -> None:
        model, x = model_on(device)
        optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.01, **options)
        for _ in range(STEPS):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

    return train


def by_data(device: str) -> None:
    model, x = model_on(device)
    total = 0
    for _ in range(STEPS):
        out = model(x)
        loss = out.square().mean()
        total = total + loss.data
        out.data.max(1)
        loss.backward()
        with torch.no_grad():
            for one in model.parameters():
                one.data.sub_(0.01 * one.grad)
                one.grad = None


def by_pointer(device: str) -> None:
    model, x = model_on(device)
    for _ in range(STEPS):
        out = model(x)
        out.data_ptr()
        out.square().mean().backward()
        model.zero_grad()


def scaled(device: str) -> None:
    model, x = model_on(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    kind = torch.device(device).type
    scaler = torch.amp.GradScaler(kind)
    for step in range(STEPS):
        optimizer.zero_grad()
        with torch.autocast(kind, dtype=torch.float16):
            loss = model(x).float().square().mean()
        # A found Inf: this step is skipped.
        scaler.scale(loss * (math.inf if step == 3 else 1)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()


def recomputed(device: str) -> None:
    model, x = model_on(device)
    for _ in range(STEPS):
        torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False).square().mean().backward()
        model.zero_grad()


def averaged(device: str) -> None:
    model, x = model_on(device)
    average = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        for kept, one in zip(average.parameters(), model.parameters(), strict=True):
            kept.data.mul_(0.9).add_(one.data, alpha=0.1)


def penalised(device: str) -> None:
    model, x = model_on(device)
    x.requires_grad_()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(STEPS):
        optimizer.zero_grad()
        (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        (gradient.square().sum() + model(x).mean()).backward()
        optimizer.step()


PROGRAMS: dict[str, Callable[[str], None]] = {
    "SGD": stepping("SGD", momentum=0.9),
    "Adam, foreach": stepping("Adam", foreach=True),
    "AdamW, fused": stepping("AdamW", fused=True),
    "Adam, capturable": stepping("Adam", capturable=True),
    "by .data": by_data,
    "a pointer to a kernel": by_pointer,
    "GradScaler": scaled,
    "checkpoint": recomputed,
    "a running average": averaged,
}


def asked_for(train: Callable[[str], None], device: str) -> dict[str, int]:
    import simulated

    simulated.forget()
    train(device)
    return simulated.counts()


@pytest.mark.filterwarnings("ignore")
@each("name", PROGRAMS)
def test_nothing_is_asked_of_the_device(name: str, device: str) -> None:
    train = PROGRAMS[name]
    plain = asked_for(train, device)
    assert plain["allocation"] > STEPS
    with gradsan.watch() as watched:
        assert asked_for(train, device) == plain
    assert watched.diagnoses == ()


def test_of_gradients_with_a_graph_samples_are_taken_now_and_then(device: str) -> None:
    plain = asked_for(penalised, device)
    with gradsan.watch() as watched:
        came = asked_for(penalised, device)
    assert watched.diagnoses == ()
    # At the 1st, 2nd, 4th, 8th … call of the line.
    assert sum(came[what] - plain.get(what, 0) for what in came if what.startswith("wait")) <= math.log2(STEPS) + 1


def test_pinned_memory_that_is_refilled_too_early(device: str) -> None:
    """The program of docs/devices.md: a wrong batch, and nobody says so."""
    page = Path(__file__).parents[2] / "docs" / "devices.md"
    [program] = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    scope: dict[str, Any] = {}
    with gradsan.watch() as watched:
        exec(program, scope)
    assert scope["batch"].tolist() == [-1.0] * 4
    assert watched.diagnoses == ()
