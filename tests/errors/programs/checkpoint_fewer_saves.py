import torch
from torch.utils.checkpoint import checkpoint


class Block:
    def __init__(self):
        self.calls = 0

    def __call__(self, x):
        self.calls += 1
        y = x.sin()
        return y.exp() if self.calls == 1 else y


x = torch.ones(4, requires_grad=True)
checkpoint(Block(), x, use_reentrant=False).sum().backward()
