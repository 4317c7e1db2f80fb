import torch

ids = torch.tensor([1, 2, 3])
ids.requires_grad_()
