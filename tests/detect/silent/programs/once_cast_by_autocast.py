import torch
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
with torch.autocast("cpu", dtype=torch.bfloat16):
    for _ in range(5):
        loss = net(torch.randn(8, 4)).float().pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
