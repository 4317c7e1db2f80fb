import torch
from torch import nn
import torch.nn.functional as F


class SqueezeExcite(nn.Module):
    def __init__(self, ch, r=4):
        super().__init__()
        self.avg = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Sequential(nn.Conv2d(ch, ch // r, 1), nn.ReLU(inplace=True), nn.Conv2d(ch // r, ch, 1), nn.Sigmoid())

    def forward(self, x):
        w = self.fc(self.avg(x))
        return x * (w * 2)
