import torch

x = torch.ones(4, requires_grad=True) * 1.0
head = x[:2]
head.detach_()
