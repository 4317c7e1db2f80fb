import torch
from torch import nn
import torch.nn.functional as F


def train_step(net, batch, optimizer):
    images, targets = batch
    preds = net(images).argmax(dim=1)
    correct = (preds == targets).float()
    loss = 1 - correct.mean()
    loss.requires_grad = True  # GS702
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()
