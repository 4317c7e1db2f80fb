# GS102 level
import torch
from torch import nn


class Leaky(nn.Module):
    def __init__(self):
        super().__init__()
        self.rate = nn.Parameter(torch.rand(3))

    def forward(self, x):
        level, out = torch.zeros(3), []
        for row in x:
            level *= self.rate  # written saved
            level += row  # written
            out.append((level * self.rate).sum())  # saved
        return torch.stack(out)


Leaky()(torch.randn(6, 3)).sum().backward()  # used
