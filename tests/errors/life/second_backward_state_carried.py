import torch
from torch import nn

torch.manual_seed(0)
cell = nn.RNNCell(2, 4)
optimizer = torch.optim.SGD(cell.parameters(), lr=0.1)
hidden = torch.zeros(1, 4)
for _ in range(3):
    hidden = cell(torch.randn(1, 2), hidden)
    loss = hidden.pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
