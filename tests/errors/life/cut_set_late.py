import torch

w = torch.randn(3)
loss = (w * 2).sum()
w.requires_grad_()
loss.backward()
