import torch
from torch import nn


class Residual(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.act = nn.SiLU(inplace=False)
        self.first = nn.LeakyReLU(0.1, inplace=True)
        self.fc1, self.fc2 = nn.Linear(d, d), nn.Linear(d, d)

    def forward(self, x):
        identity = x
        h = self.fc1(self.first(x))
        h = self.fc2(self.act(h))
        h += identity
        return h


torch.manual_seed(1)
model = nn.Sequential(nn.Linear(5, 6), Residual(6), Residual(6), nn.Linear(6, 1))
opt = torch.optim.Adam(model.parameters())
for _ in range(4):
    loss = model(torch.randn(3, 5)).abs().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
