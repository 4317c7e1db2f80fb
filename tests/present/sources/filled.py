import torch

weights = torch.randn(64, requires_grad=True)
history = torch.zeros(65)
history[0] = 1.0
for t in range(64):
    history[t + 1] = history[t] * weights[t]
history.sum().backward()
