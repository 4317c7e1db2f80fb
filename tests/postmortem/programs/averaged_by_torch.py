# GS110 teacher.module.weight
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

student = nn.Linear(3, 2)
teacher = AveragedModel(student)
x = torch.randn(4, 3, requires_grad=True)
loss = (student(x) - teacher(x)).pow(2).mean()  # saved
teacher.update_parameters(student)  # written
loss.backward()  # used
