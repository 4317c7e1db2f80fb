import torch

w = torch.ones(3, requires_grad=True)
a = w.clone()
loss = a.sin().sum()
a.detach_()
loss.backward()
