import torch
from torch import nn


class PreActivation(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.act = nn.ELU(inplace=True)
        self.fc = nn.Linear(d, d)

    def forward(self, x):
        return x + self.fc(self.act(x))


torch.manual_seed(1)
model = nn.Sequential(nn.Linear(5, 6), PreActivation(6), PreActivation(6), nn.Linear(6, 1))
opt = torch.optim.Adam(model.parameters())
for _ in range(4):
    loss = model(torch.randn(3, 5)).abs().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
