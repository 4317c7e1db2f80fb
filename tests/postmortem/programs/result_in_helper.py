# GS101 y
import torch


def squash(x):
    y = torch.sigmoid(x)  # saved
    y.mul_(2)  # written
    return y


x = torch.ones(3, requires_grad=True)
loss = squash(x * 3).sum()
loss.backward()  # used
