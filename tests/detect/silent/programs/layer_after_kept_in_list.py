import torch
from torch import nn


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.act = nn.LeakyReLU(0.1, inplace=True)

    def forward(self, x):
        kept = []
        for layer in self.layers:
            x = layer(x)
            kept.append(x)
            x = self.act(x)
        return x + kept[0]


torch.manual_seed(0)
net = Encoder()
for _ in range(3):
    net(torch.randn(8, 4)).pow(2).mean().backward()
