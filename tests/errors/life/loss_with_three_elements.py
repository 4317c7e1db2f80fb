import torch

weight = torch.ones(3, requires_grad=True)
loss = (weight * 2 - 1) ** 2
loss.backward()
