"""Parameters with parts of one flat buffer as their memory: a write through the buffer moves no counter of theirs."""

from __future__ import annotations

from typing import Any

import torch

import gradsan
from cases import each


def flattened(net: torch.nn.Module) -> torch.Tensor:
    """The buffer, of which each parameter of ``net`` has a part from now on."""
    flat = torch.cat([one.detach().reshape(-1) for one in net.parameters()])
    start = 0
    for one in net.parameters():
        one.data = flat[start : start + one.numel()].view_as(one)
        start += one.numel()
    return flat


def codes_of_a_step(mode: Any, before_backward: bool, part: slice) -> list[str]:
    net, x = torch.nn.Linear(3, 3), torch.ones(2, 3, requires_grad=True)
    with gradsan.watch(mode) as watched:
        flat = flattened(net)
        for _ in range(2):
            loss = net(x).pow(2).mean()
            if before_backward:
                flat[part].mul_(0.9)
            loss.backward()
            flat.sub_(0.1)
    return [one.code for one in watched.diagnoses]


@each("mode", ["watch", "deep"])
@each(
    ("before_backward", "part", "codes"),
    [
        (True, slice(None), ["GS202"]),
        (True, slice(0, 4), ["GS202"]),
        # The biases: addmm does not need them.
        (True, slice(9, 12), []),
        (False, slice(None), []),
    ],
    ids=["all", "weights", "biases", "after backward"],
)
def test_a_write_through_the_buffer(mode, before_backward, part, codes):
    assert codes_of_a_step(mode, before_backward, part) == codes
