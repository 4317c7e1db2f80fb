import torch


def loss(x):
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.cpu(), lambda t: t):
        return x.exp().sum()


torch.func.grad(loss)(torch.ones(3))
