# GS105 adv
import torch
from torch import nn


def slices(obs, adv):
    for start in range(0, len(obs), 2):
        yield obs[start : start + 2], adv[start : start + 2]


def loss_of(policy, obs, adv):
    adv -= adv.mean()  # written
    return (policy(obs).squeeze(1).exp() * adv).sum()  # saved


policy = nn.Linear(3, 1)
obs, adv = torch.randn(4, 3), torch.randn(4)
total = sum(loss_of(policy, *batch) for _ in range(2) for batch in slices(obs, adv))
total.backward()  # used
