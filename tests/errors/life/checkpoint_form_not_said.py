import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

block = nn.Linear(3, 3)
x = torch.ones(2, 3, requires_grad=True)
checkpoint(block, x).sum().backward()
