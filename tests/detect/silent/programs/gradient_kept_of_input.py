import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
x = torch.rand(2, 3)
delta = torch.zeros_like(x, requires_grad=True)
for _ in range(5):
    loss = model(x + delta).mean()
    loss.backward()
    step = 0.1 * delta.grad.sign()
    delta.data = (delta.data + step).clamp(-0.3, 0.3)
