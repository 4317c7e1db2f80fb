import torch


@torch.compile(backend="aot_eager")
def block(x, y):
    x.mul_(2)
    return x + y


base = torch.ones(4, requires_grad=True).clone()
block(base, base.detach())
