import torch
from torch import nn


class Coder(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc, self.dec = nn.Linear(12, 16), nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 12))
        self.mean = nn.Linear(16, 3)

    def forward(self, x):
        return self.dec(self.mean(self.enc(x).relu()))


torch.manual_seed(0)
coder = Coder()
opt = torch.optim.Adam([*coder.enc.parameters(), *coder.dec.parameters()], lr=1e-3)
for _ in range(6):
    x = torch.rand(8, 12)
    loss = (coder(x) - x).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
