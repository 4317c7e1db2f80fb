import torch
from torch import nn


class Tracker(nn.Module):
    def __init__(self):
        super().__init__()
        self.start = nn.Parameter(torch.zeros(1, 3))

    def initial(self, batch, hints):
        h = self.start.expand(batch, -1)
        h[:, 0] += hints
        return h


Tracker().initial(2, torch.ones(2)).sum().backward()
