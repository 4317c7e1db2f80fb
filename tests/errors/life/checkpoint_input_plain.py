import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, x):
        return self.inner(x).tanh()


block, head = Block(), nn.Linear(3, 1)
x = torch.ones(2, 3)
out = checkpoint(block, x, use_reentrant=True)
head(out).sum().backward()
