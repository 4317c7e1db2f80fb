import torch
from torch import nn

torch.manual_seed(0)
backbone, left, right = nn.Linear(3, 4), nn.Linear(4, 1), nn.Linear(4, 1)
features = torch.tanh(backbone(torch.randn(5, 3)))
loss_left = left(features).pow(2).mean()
loss_right = right(features).pow(2).mean()
loss_left.backward()
loss_right.backward()
