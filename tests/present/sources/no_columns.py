import torch

mask = torch.rand(3, requires_grad=True).sqrt()
mask += 1  # one more
mask.sum().backward()
