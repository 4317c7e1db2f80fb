# GS102 h
import torch
from torch import nn


def compile(act, h):
    return act(h.mul_(0.5))  # written


net = nn.Linear(3, 3)
h = net(torch.randn(4, 3))
first = (h * h).sum()  # saved
second = compile(nn.Tanh(), h)
(first + second.sum()).backward()  # used
