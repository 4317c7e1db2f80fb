import torch

x = torch.ones(3, requires_grad=True)
scale = torch.full((3,), 2.0)
x += scale
x.sum().backward()
