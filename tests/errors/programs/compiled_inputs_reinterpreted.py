import torch


@torch.compile(backend="aot_eager")
def scale(real, bits):
    real.mul_(2)
    return real + bits


base = torch.ones(4)
scale(base, base.view(torch.int32))
