import torch

w = torch.ones(3, requires_grad=True)
torch.from_dlpack(w)
