import torch
from torch.autograd.function import once_differentiable


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return grad * 2


x = torch.ones(3, requires_grad=True)
loss = Double.apply(x).pow(2).sum()
(gradient,) = torch.autograd.grad(loss, x, create_graph=True)
penalty = gradient.pow(2).sum()
penalty.backward()
