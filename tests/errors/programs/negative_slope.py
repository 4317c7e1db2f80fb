import torch
from torch.nn import functional

x = torch.ones(3, requires_grad=True) * 1.0
y = functional.leaky_relu(x, -0.1, inplace=True)
y.sum().backward()
