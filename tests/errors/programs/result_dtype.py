import torch

counts = torch.tensor([1, 2, 3])
counts *= 1.5
