# GS112 criterion.centers
import functools

import torch
from torch import nn


def then(update):
    def decorate(forward):
        @functools.wraps(forward)
        def around(self, *args):
            out = forward(self, *args)
            update(self, *args)
            return out

        return around

    return decorate


def move(self, feats, labels):
    with torch.no_grad():
        self.centers.index_add_(0, labels, 0.5 * (feats - self.centers[labels]))  # written


class CenterLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("centers", torch.randn(3, 4))

    @then(move)
    def forward(self, feats, labels):
        return torch.cdist(feats, self.centers).gather(1, labels[:, None]).mean()  # saved


criterion = CenterLoss()
net = nn.Linear(2, 4)
loss = criterion(net(torch.randn(5, 2)), torch.randint(0, 3, (5,)))
loss.backward()  # used
