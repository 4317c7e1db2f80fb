import torch
from torch import nn

torch.manual_seed(0)
cell = nn.GRUCell(4, 8)
state = torch.zeros(2, 8)
for _ in range(60):
    state = cell(torch.randn(2, 4), state)
    loss = state.pow(2).mean()
    loss.backward(retain_graph=True)
