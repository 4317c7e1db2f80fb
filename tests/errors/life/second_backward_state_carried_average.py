import torch
from torch import nn

torch.manual_seed(0)
net = nn.Linear(3, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
total = 0.0
for seen in range(1, 4):
    total = total + net(torch.randn(4, 3)).pow(2).mean()
    average = total / seen
    optimizer.zero_grad()
    average.backward()
    optimizer.step()
