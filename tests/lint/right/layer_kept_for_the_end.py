"""Decoder that takes away a part of what an earlier layer gave: another tensor than the last layer's."""

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.mix = nn.Linear(width, width)

    def forward(self, x):
        return x + torch.relu(self.mix(x))


class Decoder(nn.Module):
    def __init__(self, width=8, layers=6):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.back = nn.Parameter(torch.tensor(0.1))
        self.layers = layers

    def forward(self, x):
        kept = None
        for i in range(self.layers):
            x = self.blocks[i](x)
            if i == 3:
                kept = x
        x -= self.back * kept
        return x


net = Decoder()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(3):
    loss = net(torch.randn(4, 8)).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
