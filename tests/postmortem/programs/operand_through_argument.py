# GS102 hidden
import torch


def damp(values):
    values *= 0.5  # written


def train():
    hidden = torch.ones(3, requires_grad=True) * 2
    energy = hidden.pow(2).sum()  # saved
    damp(hidden)
    (energy + hidden.sum()).backward()  # used


train()
