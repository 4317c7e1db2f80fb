"""Sums that are shown, and noise that is taken away again: right programs that look like terms and data lost."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import gradsan

ROUNDS = 24


def _fit(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(loss.item())


def whole_objective_shown_in_turns() -> None:
    a, b = nn.Linear(4, 2), nn.Linear(4, 2)
    of_a, of_b = torch.optim.SGD(a.parameters(), 0.1), torch.optim.SGD(b.parameters(), 0.1)
    for turn in range(ROUNDS):
        x = torch.randn(8, 4)
        first, second = (a(x) - 1).pow(2).mean(), (b(x) + 1).pow(2).mean()
        if turn < ROUNDS // 2:
            _fit(of_a, first + float(second))
        else:
            _fit(of_b, second + float(first))


def critics_loss_shown_with_the_actors() -> None:
    actor, critic = nn.Linear(4, 2), nn.Linear(4, 1)
    of_actor, of_critic = torch.optim.SGD(actor.parameters(), 0.1), torch.optim.SGD(critic.parameters(), 0.1)
    for _ in range(ROUNDS):
        state = torch.randn(8, 4)
        value_loss = (critic(state) - state.sum(1, keepdim=True)).pow(2).mean()
        _fit(of_critic, value_loss)
        chances = torch.distributions.Categorical(logits=actor(state))
        action = chances.sample()
        _fit(of_actor, -(chances.log_prob(action) * action.float()).mean() + 0.5 * value_loss.item())


def noise_taken_away_after_each_round() -> None:
    net, data = nn.Linear(3, 1), torch.randn(4, 8, 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for turn in range(ROUNDS):
        batch = data[turn % 4]
        noise = 0.1 * torch.randn(8, 3)
        batch += noise
        _fit(optimizer, net(batch).pow(2).mean())
        batch -= noise


@pytest.mark.parametrize(
    "program",
    [whole_objective_shown_in_turns, critics_loss_shown_with_the_actors, noise_taken_away_after_each_round],
)
def test_right_programs_are_quiet(program: Callable[[], None]) -> None:
    torch.manual_seed(0)
    with gradsan.watch() as watched:
        program()
    assert [one.code for one in watched.diagnoses if one.severity != "note"] == []
