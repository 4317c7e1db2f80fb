import torch
from torch import nn


class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.state = torch.zeros(3, 4)

    def reset(self):
        self.state.zero_()

    def forward(self, x):
        out = self.lin(x + self.state)
        self.state = out.detach()
        return out


torch.manual_seed(0)
cell = Cell()
out = cell(torch.ones(3, 4))
cell.reset()
loss = out.pow(2).mean()
loss.backward()
