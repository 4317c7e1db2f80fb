# GS112 teacher.norm.running_mean
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x):
        return self.norm(x)  # saved


@torch.no_grad()
def follow(teacher, student):
    for mine, theirs in zip(teacher.buffers(), student.buffers(), strict=True):
        mine.copy_(theirs)  # written


student, teacher = Block(), Block().eval()
x = torch.randn(5, 3, requires_grad=True)
out = teacher(x)
follow(teacher, student)
out.sum().backward()  # used
