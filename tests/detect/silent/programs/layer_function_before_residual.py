import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.up, self.down = nn.Linear(d, 2 * d), nn.Linear(2 * d, d)

    def forward(self, x):
        shortcut = x
        y = self.down(F.gelu(self.up(F.silu(x, inplace=True))))
        return shortcut + y


torch.manual_seed(0)
net = nn.Sequential(nn.Linear(3, 4), Block(4), nn.Linear(4, 1))
opt = torch.optim.AdamW(net.parameters())
for _ in range(3):
    opt.zero_grad()
    net(torch.randn(6, 3)).pow(2).mean().backward()
    opt.step()
