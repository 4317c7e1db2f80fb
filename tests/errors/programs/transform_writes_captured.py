import torch

seen = torch.zeros(3)


def loss(x):
    seen.copy_(x)
    return x.pow(2).sum()


torch.func.grad(loss)(torch.ones(3))
