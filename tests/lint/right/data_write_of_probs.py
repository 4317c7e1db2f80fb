import torch
from torch import nn
import torch.nn.functional as F


class Gate(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.fc = nn.Linear(d, d)

    def forward(self, x):
        g = torch.sigmoid(self.fc(x))
        return x * g * (g.detach() >= 0.1).float()
