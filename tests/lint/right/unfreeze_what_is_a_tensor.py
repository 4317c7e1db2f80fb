from collections.abc import Sequence

import torch
from torch import nn


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.norm = nn.LayerNorm(8)
        self.position = nn.Parameter(torch.zeros(8))
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])

    def unfreeze(self, count):
        def free(part):
            if isinstance(part, Sequence):
                for inner in part:
                    free(inner)
            elif isinstance(part, nn.Parameter):
                part.requires_grad = True
            else:
                for parameter in part.parameters():
                    parameter.requires_grad = True

        free([[self.conv, self.position], *self.blocks, self.norm, self.position][-count:])


for part in [nn.Linear(2, 2), nn.Parameter(torch.ones(2))]:
    if torch.is_tensor(part):
        part.requires_grad = False
    if hasattr(part, "requires_grad"):
        part.requires_grad = False
    if not isinstance(part, nn.Module):
        part.requires_grad = False


class Scale(nn.Parameter):
    def __init__(self, data=None):
        super().__init__()
        self.requires_grad = True
