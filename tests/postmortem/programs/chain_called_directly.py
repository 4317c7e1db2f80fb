# GS103 -
import torch
from torch import nn

net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Hardtanh(-0.5, 0.5, inplace=True))
x = torch.randn(4, 3)
out = net(x)  # saved written
out.sum().backward()  # used
