import torch
from torch import nn
import torch.nn.functional as F


X = torch.randn(100, 3)
y = X @ torch.tensor([[2.0], [-1.0], [0.5]])
w = torch.randn(3, 1, requires_grad=True)
b = torch.zeros(1, requires_grad=True)
for epoch in range(50):
    y_hat = X @ w + b
    loss = ((y_hat - y) ** 2).mean()
    loss.backward()
    w = w - 0.1 * w.grad  # GS409 (maybe)
    b = b - 0.1 * b.grad  # GS409 (maybe)
