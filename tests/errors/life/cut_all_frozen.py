import torch
from torch import nn

net = nn.Linear(3, 2)
for p in net.parameters():
    p.requires_grad = False
loss = net(torch.randn(6, 3)).sum()
loss.backward()
