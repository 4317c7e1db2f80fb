import torch

p = torch.ones(3, requires_grad=True)
for _ in range(2):
    loss = (p**2).sum()
    loss.backward()
    if p.grad is None:
        break
    p = p - 0.1 * p.grad
