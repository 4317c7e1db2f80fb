import torch

x = torch.ones(3, requires_grad=True)
with torch.autograd.graph.saved_tensors_hooks(lambda t: t.mul_(0.5), lambda t: t):
    y = x.exp()
y.sum().backward()
