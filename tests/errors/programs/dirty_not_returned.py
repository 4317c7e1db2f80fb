import torch


class Shift(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.add_(1.0).clone()

    @staticmethod
    def backward(ctx, grad):
        return grad


x = torch.ones(3, requires_grad=True) * 1.0
Shift.apply(x)
