import torch

w = torch.ones(3, requires_grad=True)
w.data = torch.ones(3).to_sparse()
