import torch

x, y = torch.ones(4, 2), torch.zeros(4)
weight = torch.zeros(2, requires_grad=True)
loss = (x @ weight - y).pow(2).mean()
loss.backward()
weight -= 0.1 * weight.grad
