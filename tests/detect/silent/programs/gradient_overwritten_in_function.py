import torch


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad.neg_()


w = torch.tensor([1.0, 2.0], requires_grad=True)
v = torch.tensor([0.5, 0.5], requires_grad=True)
loss = (v * 1 + Reverse.apply(w * 1)).pow(2).sum()
loss.backward()
