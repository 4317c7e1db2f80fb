import torch
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 1))
opt = torch.optim.SGD(net.parameters(), lr=0.05)
for _ in range(6):
    error = nn.functional.mse_loss(net(torch.randn(8, 6)), torch.randn(8, 1))
    penalty = sum(p.data.pow(2).sum() for p in net.parameters())
    loss = error + 1e-3 * penalty
    opt.zero_grad()
    loss.backward()
    opt.step()
