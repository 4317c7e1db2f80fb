import torch

x = torch.ones(4, requires_grad=True).clone()
x.resize_(2)
