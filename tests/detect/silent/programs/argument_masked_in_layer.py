import torch
from torch import nn


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(3, 3)

    def forward(self, tokens):
        tokens[:, 0] = 0.0
        return self.lin(tokens)


torch.manual_seed(0)
net = nn.Sequential(Masked(), nn.Tanh())
data = torch.rand(4, 3)
out = net(data)
error = (out * data).sum()
error.backward()
