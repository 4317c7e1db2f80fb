import torch
from torch import nn

net = nn.Linear(3, 1)
losses = []
for _ in range(3):
    losses.append(net(torch.randn(2, 3)).pow(2).mean().item())
loss = torch.tensor(losses).mean()
loss.backward()
