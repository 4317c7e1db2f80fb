import torch

weight = torch.ones(3, requires_grad=True)
weight.grad = torch.ones(2)
