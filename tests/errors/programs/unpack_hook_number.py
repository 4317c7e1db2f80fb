import torch

x = torch.ones(3, requires_grad=True)
with torch.autograd.graph.saved_tensors_hooks(lambda t: t.sum().item(), lambda number: number):
    y = x.exp()
y.sum().backward()
