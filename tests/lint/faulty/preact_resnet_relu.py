import torch
from torch import nn
import torch.nn.functional as F


class PreActBottleneck(nn.Module):
    expansion = 4

    def __init__(self, inplanes, planes, stride=1):
        super().__init__()
        self.bn1 = nn.BatchNorm2d(inplanes)
        self.conv1 = nn.Conv2d(inplanes, planes, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes * 4, 3, stride=stride, padding=1, bias=False)
        self.relu = nn.ReLU(inplace=True)
        self.down = None
        if stride != 1 or inplanes != planes * 4:
            self.down = nn.Conv2d(inplanes, planes * 4, 1, stride=stride)

    def forward(self, x):
        residual = x if self.down is None else self.down(x)
        out = self.relu(x)  # GS103
        out = self.conv1(self.bn1(out))
        out = self.conv2(self.relu(self.bn2(out)))
        return out + residual
