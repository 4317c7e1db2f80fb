# GS121 y
import torch

x = torch.ones(3, requires_grad=True)
y = x.exp()  # saved
exec("y.add_" + "(1)")
y.sum().backward()  # used
