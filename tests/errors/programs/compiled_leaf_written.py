import torch

w = torch.ones(3, requires_grad=True)


@torch.compile(backend="eager")
def update(rate):
    w.sub_(rate)


update(0.1)
