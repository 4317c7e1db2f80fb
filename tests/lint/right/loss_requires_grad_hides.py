import torch
from torch import nn
import torch.nn.functional as F


def train_step(net, batch, optimizer):
    images, targets = batch
    loss = F.cross_entropy(net(images), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()
