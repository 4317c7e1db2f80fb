import torch
from torch.utils.checkpoint import checkpoint

width = 2


def block(x):
    return x[:, :width].sin().exp()


x = torch.ones(4, 4, requires_grad=True)
y = checkpoint(block, x, use_reentrant=False)
width = 3
y.sum().backward()
