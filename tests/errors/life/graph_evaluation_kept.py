import torch
from torch import nn


def evaluate(net, batches):
    losses = []
    for _ in range(batches):
        out = net(torch.randn(16, 8))
        losses.append(out.pow(2).mean())
    return sum(loss.item() for loss in losses) / batches


torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
print(evaluate(net, 600))
