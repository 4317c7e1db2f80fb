"""Programs with many of one thing: parameters, optimizers, arrays, lines. The cost of each must not grow with them."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import torch


def parameters(count: int) -> None:
    """Small parameters of one optimizer, three rounds."""
    made = [torch.nn.Parameter(torch.ones(2)) for _ in range(count)]
    optimizer = torch.optim.SGD(made, lr=0.1, foreach=False)
    for _ in range(3):
        optimizer.zero_grad()
        torch.stack([(one * one).sum() for one in made]).sum().backward()
        optimizer.step()


def optimizers(count: int) -> None:
    """Optimizers of one parameter each, two rounds."""
    made = [torch.nn.Parameter(torch.ones(2)) for _ in range(count)]
    owners = [torch.optim.SGD([one], lr=0.1) for one in made]
    for _ in range(2):
        for one, optimizer in zip(made, owners, strict=True):
            optimizer.zero_grad()
            (one * one).sum().backward()
            optimizer.step()


def arrays(count: int) -> None:
    """Tensors that share memory with NumPy, one backward for each."""
    data = [torch.from_numpy(torch.ones(4).numpy()) for _ in range(count)]
    weight = torch.nn.Parameter(torch.ones(4))
    for one in data:
        (weight * one).sum().backward()


def updates_behind_data(count: int) -> None:
    """Parameters that are updated through ``.data``, three rounds."""
    made = [torch.nn.Parameter(torch.ones(2)) for _ in range(count)]
    for _ in range(3):
        torch.stack([(one * one).sum() for one in made]).sum().backward()
        for one in made:
            gradient: Any = one.grad
            one.data.add_(gradient.data, alpha=-0.1)
            gradient.data.zero_()


def gradients(count: int) -> None:
    """The rows of a Jacobian, one call of ``autograd.grad`` for each."""
    start = torch.ones(64, requires_grad=True)
    result = torch.sin(start) * start
    for place in range(count):
        torch.autograd.grad(result[place % 64], start, retain_graph=True)


def parts_of_a_buffer(count: int) -> None:
    """Rows that are written into one tensor of the graph."""
    weight = torch.nn.Parameter(torch.ones(2))
    buffer = torch.zeros(count, 2)
    for place in range(count):
        buffer[place] = weight * place
    buffer.sum().backward()


def lines(count: int) -> None:
    """Lines of the program, each with a backward of its own."""
    text = "\n".join(f"(weight * {place}).sum().backward()" for place in range(count))
    exec(compile(text, "<lines>", "exec"), {"weight": torch.nn.Parameter(torch.ones(2))})


ITEMS: dict[str, Callable[[int], None]] = {
    "parameters of one optimizer": parameters,
    "optimizers": optimizers,
    "arrays taken in": arrays,
    "updates behind `.data`": updates_behind_data,
    "calls of `autograd.grad`": gradients,
    "rows written into a buffer": parts_of_a_buffer,
    "lines with a backward": lines,
}


def seconds_each(name: str, count: int) -> float:
    """Seconds for each of ``count`` items, after a run of two that pays for imports."""
    run = ITEMS[name]
    run(2)
    gc.collect()
    began = time.perf_counter()
    run(count)
    return (time.perf_counter() - began) / count
