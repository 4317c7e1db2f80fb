import torch

w = torch.ones(3, requires_grad=True)
w.data = torch.tensor([1, 2, 3])
