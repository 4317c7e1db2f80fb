import torch


class F(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        g.t_()
        return g.t() * 2


@torch.compile(backend="aot_eager")
def f(x):
    return F.apply(x)


f(torch.ones(2, 3, requires_grad=True)).sum().backward()
