# GS110 critic.2.weight
import torch
from torch import nn


def fit(critic, actor, optimizers):
    actions = actor(torch.randn(4, 3))
    value = critic(actions).mean()  # saved
    (value**2).backward(retain_graph=True)
    optimizers["critic"].step()  # written
    (-value).backward()  # used


critic = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
actor = nn.Linear(3, 2)
fit(
    critic,
    actor,
    {"critic": torch.optim.Adam(critic.parameters()), "actor": torch.optim.SGD(actor.parameters(), lr=0.1)},
)
