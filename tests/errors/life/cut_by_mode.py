import torch
from torch import nn

net = nn.Linear(3, 2)
torch.set_grad_enabled(False)
loss = net(torch.randn(6, 3)).sum()
loss.backward()
