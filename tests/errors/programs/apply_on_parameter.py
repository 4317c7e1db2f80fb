import torch

w = torch.ones(3, requires_grad=True)
w.apply_(lambda value: value + 1)
