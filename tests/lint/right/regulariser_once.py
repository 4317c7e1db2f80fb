import torch
from torch import nn
import torch.nn.functional as F


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 8)
        self.b = nn.Linear(8, 1)

    def forward(self, x):
        return self.b(self.a(x).tanh())


def l2(model):
    total = torch.tensor(0.0)
    for p in model.parameters():
        total = total + p.pow(2).sum()
    return total


net = Net()
opt = torch.optim.Adam(net.parameters())
for epoch in range(10):
    x = torch.randn(16, 4)
    loss = net(x).pow(2).mean() + 1e-4 * l2(net)
    opt.zero_grad()
    loss.backward()
    opt.step()
