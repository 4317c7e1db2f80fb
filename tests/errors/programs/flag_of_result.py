import torch

w = torch.ones(3, requires_grad=True)
frozen = w * 2
frozen.requires_grad = False
