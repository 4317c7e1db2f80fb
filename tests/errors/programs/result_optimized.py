import torch
from torch import nn

net = nn.Linear(3, 2)
scale = nn.Parameter(torch.rand(2)).double()
torch.optim.Adam([{"params": net.parameters()}, {"params": [scale], "lr": 0.01}])
