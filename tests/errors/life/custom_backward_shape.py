import torch


class Head(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad[:2] * 2


x = torch.ones(3, requires_grad=True)
Head.apply(x).sum().backward()
