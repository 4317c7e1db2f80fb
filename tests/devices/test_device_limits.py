"""Devices that lack an operator, or memory: what gradsan asks for beside the program may fail, the program may not.

Each program runs plain; then the simulated device has no kernel but those that the program has asked for, or no more
memory than it has used, and gradsan watches. The program has to end with the very same numbers.
"""

from __future__ import annotations

import mmap
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import nn

import gradsan
from cases import each

MODES: tuple[Literal["watch", "deep", "heal", "nonfinite"], ...] = ("watch", "deep", "heal", "nonfinite")


@pytest.fixture(autouse=True)
def only_where_it_can_be_limited(device: str) -> None:
    if not device.startswith("simulated"):
        pytest.skip("only the simulated device can be limited")


def stepping(device: str) -> Any:
    layers = nn.Linear(8, 16), nn.Tanh(), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 4)
    model = nn.Sequential(*layers).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    x = torch.randn(4, 8).to(device)
    for _ in range(4):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return model.state_dict()


def recomputed(device: str) -> Any:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)).to(device)
    x = torch.randn(4, 8).to(device)
    for _ in range(2):
        torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False).square().mean().backward()
    return {name: one.grad for name, one in model.named_parameters()}


def penalised(device: str) -> Any:
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.randn(4, 8).to(device).requires_grad_()
    for _ in range(3):
        optimizer.zero_grad()
        (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        (gradient.square().sum() + model(x).mean()).backward()
        optimizer.step()
    return model.state_dict()


def by_data(device: str) -> Any:
    """Writes past the counter, to what nothing needs any more."""
    weight = torch.randn(4, 4).to(device).requires_grad_()
    average = weight.detach().clone()
    for _ in range(3):
        hidden = (weight * 2).sigmoid()
        hidden.sum().backward()
        hidden.data.mul_(0)
        weight.data.sub_(weight.grad, alpha=0.1)
        weight.grad.zero_()
        average.data.mul_(0.9).add_(weight.data, alpha=0.1)
    return {"weight": weight, "average": average}


def not_finite(device: str) -> Any:
    weight = torch.zeros(3, 4).to(device).requires_grad_()
    for _ in range(2):
        (weight.sqrt() * 0).t().sum().backward()
    return {"gradient": weight.grad}


def overwritten(device: str) -> Any:
    """A fault: the gradient is wrong, silently, and stays so."""
    weight = torch.tensor([0.5, 1.0]).to(device).requires_grad_()
    hidden = weight * 2
    loss = hidden.square().sum()
    hidden.data.add_(1)
    loss.backward()
    return {"gradient": weight.grad}


PROGRAMS: dict[str, Callable[[str], Any]] = {
    one.__name__: one for one in (stepping, recomputed, penalised, by_data, not_finite, overwritten)
}


def run(program: Callable[[str], Any], device: str) -> dict[str, Any]:
    torch.manual_seed(0)
    return {name: one.detach().cpu() for name, one in program(device).items()}


def differing(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    return [name for name in one if not torch.equal(one[name].nan_to_num(7), other[name].nan_to_num(7))]


@pytest.mark.filterwarnings("ignore")
@each("mode", MODES)
@each("name", PROGRAMS)
def test_operators_that_the_program_does_not_use_may_be_missing(name: str, mode: Any, device: str) -> None:
    import simulated

    if (name, mode) == ("overwritten", "heal"):
        return
    simulated.forget()
    plain = run(PROGRAMS[name], device)
    with gradsan.watch(mode), simulated.restricted(to_known_kernels=True):
        came = run(PROGRAMS[name], device)
    assert differing(plain, came) == []


@pytest.mark.filterwarnings("ignore")
@each("mode", MODES)
@each("name", PROGRAMS)
def test_with_the_memory_of_the_plain_program(name: str, mode: Any, device: str) -> None:
    """Copies of what is saved take memory that the program may be short of; gradsan itself fails for none."""
    import simulated

    if (name, mode) == ("overwritten", "heal"):
        return
    simulated.forget()
    plain = run(PROGRAMS[name], device)
    with gradsan.watch(mode), simulated.restricted(bytes=simulated.most_bytes()):
        try:
            came = run(PROGRAMS[name], device)
        except torch.OutOfMemoryError as error:
            assert mode in ("deep", "heal") or (name, mode) == ("not_finite", "nonfinite")
            places = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
            assert not [place for place in places[-1:] if Path(gradsan.__file__).parent in Path(place).parents]
            return
    assert differing(plain, came) == []


@pytest.mark.filterwarnings("ignore")
@each("mode", ("deep", "heal"))
def test_copies_leave_as_much_memory_as_they_take(mode: Any, device: str) -> None:
    """The program has the memory that it needs, and the report says how much the copies took."""
    import simulated

    page, saved, values = mmap.PAGESIZE, 4, 40
    inputs = [torch.randn(saved * page // 4).to(device).requires_grad_() for _ in range(values)]
    # Were every value copied, the last results would have no memory.
    total = simulated.live_bytes() + 13 * saved * page * values // 8
    with gradsan.watch(mode) as watched, simulated.restricted(bytes=total):
        results = [one.sin() for one in inputs]
        while results:
            results.pop().sum().backward()
    (copies,) = watched.report.seen.copies
    assert (copies.device, copies.bytes // (saved * page) + copies.left_out) == (device, values)
    assert 0 < copies.left_out < values
    assert all(torch.equal(one.grad.cpu(), one.detach().cpu().cos()) for one in inputs)


@pytest.mark.filterwarnings("ignore")
def test_values_without_a_copy_are_named(device: str) -> None:
    import simulated

    with gradsan.watch("deep") as watched:
        weight = torch.randn(64, 64).to(device).requires_grad_()
        with simulated.restricted(bytes=simulated.live_bytes() + 2 * mmap.PAGESIZE):
            spread = weight.var()
    spots = {spot.key: spot.values for spot in watched.report.seen.blind_spots}
    assert spots["blind.no_memory_for_originals"] == {"device": device}
    assert spread.requires_grad
