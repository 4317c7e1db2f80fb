"""A parameter that is made of an expanded tensor, in a module that a container holds."""

import torch
from torch import nn


class Gain(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(0.5).expand(width))

    def forward(self, x):
        return x * self.gain


net = nn.Sequential(nn.Linear(3, 4), Gain(4))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
net(torch.ones(2, 3)).sum().backward()
optimizer.step()
