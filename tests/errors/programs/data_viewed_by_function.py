import torch


class Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, table):
        return table.view(-1)

    @staticmethod
    def backward(ctx, grad):
        return grad.view(2, 2)


scale = torch.ones(4, requires_grad=True)
flat = Rows.apply(torch.ones(2, 2))
flat.mul_(scale)
flat.sum().backward()
