# GS103 -
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.ReLU(inplace=True), nn.Linear(4, 1))

    def forward(self, x):
        return self.body(x)  # saved written


net = Net()
net(torch.randn(2, 4)).mean().backward()  # used
