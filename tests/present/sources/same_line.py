import torch


def train():
    x = torch.randn(4, requires_grad=True)
    y = torch.sigmoid(x).mul_(2)
    y.sum().backward()


train()
