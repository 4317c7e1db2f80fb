import torch

x = torch.ones(4, 3, requires_grad=True)
features = x * 1.0
with torch.no_grad():
    first = features[:2]
features.mul_(0.5)
first.pow(2).sum().backward()
