import torch
import torch.nn.functional as F
from torch import nn


class Center:
    def __call__(self, batch):
        batch -= batch.mean(0)
        return batch


torch.manual_seed(0)
center, net = Center(), nn.Linear(4, 4)
for _ in range(3):
    batch = torch.randn(8, 4) + 3
    F.mse_loss(net(center(batch)), batch).backward()
