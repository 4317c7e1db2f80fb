import torch


class Square(torch.autograd.Function):
    clear_saved_tensors_on_access = True

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return (x + ctx.saved_tensors[0]) * grad


x = torch.ones(3, requires_grad=True)
Square.apply(x).sum().backward()
