# GS102 b
import torch

x = torch.ones(3, requires_grad=True)
a = x * 2
b = x * 3
p = a.exp()
q = a.sin()
r = b.sin()  # saved
b += 1  # written
(p + q + r + b).sum().backward()  # used
