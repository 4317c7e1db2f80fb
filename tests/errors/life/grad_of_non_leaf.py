import torch

x = torch.ones(3, requires_grad=True)
hidden = x * 2
hidden.sum().backward()
print(hidden.grad)
