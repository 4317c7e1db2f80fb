import torch
from torch import nn

torch.manual_seed(0)
net = nn.Linear(3, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
penalty = 0.01 * net.weight.pow(2).sum()
for _ in range(2):
    loss = net(torch.randn(4, 3)).pow(2).mean() + penalty
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
