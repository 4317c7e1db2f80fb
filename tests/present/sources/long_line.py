# ruff: noqa
# fmt: off
import torch
a = torch.rand(2, requires_grad=True)
first = torch.exp(a); second = first * 2 + torch.zeros_like(first) + torch.ones_like(first).mul(3); first.add_(second.detach()); third = first + second
third.sum().backward()
