import torch

w = torch.ones(3, requires_grad=True)
total = torch.zeros(3)
torch.mul(w, 2.0, out=total)
