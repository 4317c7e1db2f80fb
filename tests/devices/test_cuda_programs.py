"""Programs of CUDA alone: graphs, cuDNN's recurrent networks, streams, half precision, torch's own sanitizer.

No machine of this project's CI has such a device: without one they are skipped (``make test-gpu`` runs them). Each
right program has to compute the same as without gradsan, without a finding, and where CUDA can tell, without a wait.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import gradsan

STEPS = 6


@pytest.fixture(autouse=True)
def only_on_cuda(device: str) -> None:
    if not device.startswith("cuda"):
        pytest.skip("needs CUDA")


@contextlib.contextmanager
def no_waits() -> Iterator[None]:
    """A block in which torch raises where the host waits for the device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def perceptron(device: str) -> tuple[nn.Module, Any]:
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)).to(device), torch.randn(8, 16, device=device)


def waiting_for_nothing(device: str) -> Any:
    model, x = perceptron(device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model(x).square().mean().backward()
    with no_waits():
        for _ in range(STEPS):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    return model.state_dict()


def recurrent(device: str) -> Any:
    """The weights are one flat memory, and the forward keeps a reserve of cuDNN's."""
    model, x = nn.LSTM(8, 8, num_layers=2).to(device), torch.randn(5, 3, 8, device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(x)[0].square().mean().backward()
        optimizer.step()
    return model.state_dict()


def replayed(device: str) -> Any:
    """A whole step as a CUDA graph, whose static input is overwritten before each replay."""
    model, x = perceptron(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    static = x.clone()
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            optimizer.zero_grad(set_to_none=True)
            model(static).square().mean().backward()
            optimizer.step()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    optimizer.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        model(static).square().mean().backward()
        optimizer.step()
    for number in range(STEPS):
        static.copy_(x + number)
        graph.replay()
    return model.state_dict()


def on_a_second_stream(device: str) -> Any:
    model, x = perceptron(device)
    aside = torch.cuda.Stream()
    for _ in range(STEPS):
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            batch = x * 2
        torch.cuda.current_stream().wait_stream(aside)
        batch.record_stream(torch.cuda.current_stream())
        model(batch).square().mean().backward()
    return {name: one.grad for name, one in model.named_parameters()}


def in_half_precision(device: str) -> Any:
    """Autocast keeps the weights in half precision until it is left."""
    model, x = perceptron(device)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.01), torch.amp.GradScaler("cuda")
    for _ in range(STEPS):
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = (model(x) + model(x + 1)).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return model.state_dict()


def channels_last(device: str) -> Any:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True)).to(device)
    model.to(memory_format=torch.channels_last)
    x = torch.randn(4, 3, 8, 8, device=device).to(memory_format=torch.channels_last)
    for _ in range(STEPS):
        model(x).mean().backward()
    return {name: one.grad for name, one in model.named_parameters()}


PROGRAMS: tuple[Callable[[str], Any], ...] = (
    waiting_for_nothing,
    recurrent,
    replayed,
    on_a_second_stream,
    in_half_precision,
    channels_last,
)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_the_same_as_without_gradsan(program: Callable[[str], Any], device: str) -> None:
    torch.manual_seed(0)
    plain = {name: one.detach().clone() for name, one in program(device).items()}
    torch.manual_seed(0)
    with gradsan.watch() as watched:
        came = program(device)
    assert watched.diagnoses == ()
    for name, one in plain.items():
        torch.testing.assert_close(came[name].detach(), one)


def test_a_step_between_forward_and_backward_of_a_recurrent_network(device: str) -> None:
    """cuDNN saves the flat weights; the step overwrites them through its parameters."""
    model, x = nn.LSTM(8, 8).to(device), torch.randn(5, 3, 8, device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with gradsan.watch() as watched:
        first, second = model(x)[0].mean(), model(x)[0].square().mean()
        first.backward()
        optimizer.step()
        with contextlib.suppress(RuntimeError):
            second.backward()
    assert [one.code for one in watched.diagnoses] == ["GS110"]


def test_beside_torchs_own_sanitizer() -> None:
    program = (
        "import torch, gradsan\n"
        "import torch.cuda._sanitizer as sanitizer\n"
        "sanitizer.enable_cuda_sanitizer()\n"
        "with gradsan.watch() as watched:\n"
        "    weight = torch.ones(4, device='cuda', requires_grad=True)\n"
        "    (weight * weight).sum().backward()\n"
        "assert watched.diagnoses == () and weight.grad.tolist() == [2.0] * 4\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
