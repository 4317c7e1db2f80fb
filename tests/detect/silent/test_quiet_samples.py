"""Right programs whose losses depend on a sample without a graph and on its distribution: not a warning."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from quiet_programs import warnings_about
from torch import nn
from torch.distributions import Beta, Normal, kl_divergence

ROUNDS = 6


def _fit(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def actor_and_critic_in_one_loss() -> None:
    policy, values = nn.Linear(4, 2), nn.Linear(5, 1)
    optimizer = torch.optim.Adam([*policy.parameters(), *values.parameters()], lr=0.01)
    for _ in range(ROUNDS):
        state = torch.randn(16, 4)
        for kind in (Normal, Beta):
            mean, spread = (F.softplus(one) + 1 for one in policy(state).chunk(2, 1))
            chosen = kind(mean, spread)
            action = chosen.sample()
            reward = -(action - 0.5).abs()
            value = values(torch.cat([state, action], 1))
            score = chosen.log_prob(action) * (reward - value.detach())
            _fit(optimizer, (value - reward).pow(2).mean() - score.mean() - 0.01 * chosen.entropy().mean())


def a_model_that_is_fed_its_own_predictions() -> None:
    cell, head = nn.GRUCell(1, 8), nn.Linear(8, 2)
    optimizer = torch.optim.Adam([*cell.parameters(), *head.parameters()], lr=0.01)
    for turn in range(ROUNDS):
        series = torch.sin(torch.rand(16, 1) * 6 + torch.arange(6.0)).T.unsqueeze(-1)
        state, x, loss = torch.zeros(16, 8), series[0], torch.zeros(())
        for y in series[1:]:
            state = cell(x, state)
            mean, spread = head(state).chunk(2, -1)
            predicted = Normal(mean, spread.exp())
            x = predicted.sample()
            by_hand = (0.5 * ((mean - y) / spread.exp()).pow(2) + spread).mean()
            loss = loss + (by_hand if turn % 2 else -predicted.log_prob(y).mean())
        _fit(optimizer, loss)


def straight_through_and_scores_by_hand() -> None:
    mean, spread, net = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3)), nn.Linear(3, 1)
    optimizer = torch.optim.Adam([mean, spread, *net.parameters()], lr=0.01)
    for _ in range(ROUNDS):
        drawn = Normal(mean, spread.exp()).sample((16,))
        cost = (net(drawn) - drawn.sum(1, keepdim=True)).pow(2)
        density = (-0.5 * ((drawn - mean) / spread.exp()).pow(2) - spread).sum(1)
        through = Normal(mean, spread.exp()).sample()
        through = through + mean - mean.detach()
        _fit(optimizer, cost.mean() + (density * cost.detach().squeeze(1)).mean() + net(through).sum() + mean.norm())


def samples_that_the_program_cuts_itself() -> None:
    encoder, decoder = nn.Linear(6, 4), nn.Linear(2, 6)
    optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()], lr=0.01)
    for turn in range(ROUNDS):
        x = torch.randn(16, 6)
        mean, spread = encoder(x).chunk(2, 1)
        latent = Normal(mean, spread.exp())
        if turn % 2:
            code = latent.sample().detach()
        else:
            with torch.no_grad():
                code = latent.sample()
        loss = (decoder(code) - x).pow(2).mean() + kl_divergence(latent, Normal(0.0, 1.0)).mean()
        _fit(optimizer, loss)


def wake_and_sleep() -> None:
    encoder, decoder = nn.Linear(6, 4), nn.Linear(2, 6)
    optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()], lr=0.01)

    def latent(x: torch.Tensor) -> Normal:
        mean, spread = encoder(x).chunk(2, 1)
        return Normal(mean, spread.exp())

    for _ in range(ROUNDS):
        x, z = torch.randn(16, 6), torch.randn(16, 2)
        wake = -Normal(decoder(latent(x).sample()), 1.0).log_prob(x).mean()
        sleep = -latent(Normal(decoder(z), 1.0).sample()).log_prob(z).mean()
        _fit(optimizer, wake + sleep)


PROGRAMS = (
    actor_and_critic_in_one_loss,
    a_model_that_is_fed_its_own_predictions,
    straight_through_and_scores_by_hand,
    samples_that_the_program_cuts_itself,
    wake_and_sleep,
)


@pytest.mark.parametrize("mode", ["watch", "deep"])
def test_not_a_warning(mode: str) -> None:
    assert warnings_about(PROGRAMS, mode) == {}
