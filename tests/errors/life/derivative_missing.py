import torch

a = torch.ones(3, requires_grad=True)
x = torch.ones(3)
value = torch.igamma(a, x)
value.sum().backward()
