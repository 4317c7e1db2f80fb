import torch
from torch import nn

torch.manual_seed(0)
net = nn.Linear(5, 2)
for _ in range(3):
    net.zero_grad()
    out = net(torch.randn(10, 5))
    out[:, 0].pow(2).mean().backward(retain_graph=True)
    first = net.weight.grad
    out[:, 1].abs().mean().backward()
    second = net.weight.grad - first
    with torch.no_grad():
        net.weight -= 0.1 * (first + second * (first * second).sum().sign())
