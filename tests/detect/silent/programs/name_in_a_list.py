import torch
from torch import nn

torch.manual_seed(0)
force = nn.Linear(2, 2)
target = torch.randn(5, 3, 2)
pos, path = torch.zeros(3, 2), []
for t in range(5):
    pos += 0.1 * force(torch.full((3, 2), float(t)))
    path.append((t, pos))
loss = sum((at - target[t]).pow(2).mean() for t, at in path)
loss.backward()
