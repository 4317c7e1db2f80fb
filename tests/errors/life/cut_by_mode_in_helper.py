import torch
from torch import nn

net = nn.Linear(3, 2)


def error_of(x):
    torch.set_grad_enabled(False)
    return net(x).abs().mean()


def train_on(x):
    loss = net(x).pow(2).mean()
    loss.backward()


for _ in range(2):
    train_on(torch.randn(6, 3))
    error_of(torch.randn(6, 3))
