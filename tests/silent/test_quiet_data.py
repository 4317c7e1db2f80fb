"""Right programs that write into parts of what they train on, in every epoch: not a warning."""

from __future__ import annotations

import pytest
import torch
from quiet_programs import warnings_about
from torch import nn

EPOCHS, PARTS, SIZE = 5, 4, 8


def _fit(net: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    optimizer.zero_grad()
    net(x).pow(2).mean().backward()
    optimizer.step()


def masks_and_channels_that_are_the_same_each_time() -> None:
    net, data = nn.Linear(6, 1), torch.randn(PARTS * SIZE, 6)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    missing = torch.rand(SIZE, 6) < 0.2
    for _ in range(EPOCHS):
        for i in range(PARTS):
            x = data[i * SIZE : (i + 1) * SIZE]
            x[missing] = 0.0
            x[:, 5] = torch.randn(SIZE)
            x[:, 4] = x[:, 4].clamp(-1, 1)
            seeded = torch.rand(SIZE, generator=torch.Generator().manual_seed(i)) < 0.3
            x[seeded] = 0.0
            _fit(net, optimizer, x)


def states_that_walk() -> None:
    net = nn.Linear(6, 6)
    optimizer = torch.optim.Adam(net.parameters())
    chains, particles = torch.rand(PARTS * SIZE, 6).round(), torch.randn(PARTS, SIZE, 6)
    for _ in range(EPOCHS):
        for i in range(PARTS):
            chain, walk = chains[i * SIZE : (i + 1) * SIZE], particles[i]
            flips = torch.rand(SIZE, 6) < 0.3
            with torch.no_grad():
                chain[flips] = torch.bernoulli(net(chain).sigmoid())[flips]
                again = (net(chain) > 0).float()
                chain[torch.rand(SIZE) < 0.1] = again[0]
                walk += 0.1 * net(walk) + 0.1 * torch.randn(SIZE, 6)
            _fit(net, optimizer, chain + walk)


def parts_that_are_filled_anew() -> None:
    net, pool, clean = nn.Linear(6, 1), torch.empty(PARTS * SIZE, 6), torch.randn(PARTS * SIZE, 6)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(EPOCHS):
        pool.copy_(clean)
        for i in range(PARTS):
            x = pool[i * SIZE : (i + 1) * SIZE]
            x += 0.1 * torch.randn_like(x)
            x[torch.rand(SIZE) < 0.2] = 0.0
            _fit(net, optimizer, x)


def counts_and_priorities() -> None:
    net, data = nn.Linear(6, 1), torch.randn(PARTS, SIZE, 6)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    seen, weights = torch.zeros(PARTS, SIZE), torch.ones(PARTS, SIZE)
    for _ in range(EPOCHS):
        for i in range(PARTS):
            count, weight, x = seen[i], weights[i], data[i]
            count += 1
            with torch.no_grad():
                weight.mul_(0.9).add_(0.1 * net(x).abs().squeeze(1))
            _fit(net, optimizer, x * weight[:, None])


PROGRAMS = (
    masks_and_channels_that_are_the_same_each_time,
    states_that_walk,
    parts_that_are_filled_anew,
    counts_and_priorities,
)


@pytest.mark.parametrize("mode", ["watch", "deep"])
def test_not_a_warning(mode: str) -> None:
    assert warnings_about(PROGRAMS, mode) == {}
