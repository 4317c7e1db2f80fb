import torch

row = torch.ones(3)
row.add_(torch.ones(2, 3))
