import torch

w = torch.ones(3, 1, requires_grad=True)
table = (w * 1.0).expand(3, 4)
table += 1.0
table.sum().backward()
