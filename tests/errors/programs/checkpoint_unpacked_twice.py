import torch
from torch.utils.checkpoint import checkpoint


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        (y,) = ctx.saved_tensors
        return (x + y) * grad


x = torch.ones(3, requires_grad=True)
y = checkpoint(lambda t: Twice.apply(t.sin()).exp(), x, use_reentrant=False)
y.sum().backward()
