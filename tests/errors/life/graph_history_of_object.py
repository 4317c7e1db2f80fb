import torch
from torch import nn


class Trainer:
    def __init__(self):
        self.net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
        self.opt = torch.optim.Adam(self.net.parameters())
        self.history = []

    def step(self, x):
        out = self.net(x)
        loss = out.pow(2).mean()
        self.opt.zero_grad()
        loss.backward()
        self.opt.step()
        self.history.append(out)


torch.manual_seed(0)
trainer = Trainer()
for _ in range(50):
    trainer.step(torch.randn(64, 8))
