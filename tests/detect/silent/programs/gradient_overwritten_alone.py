import torch
from torch import nn

torch.manual_seed(0)
layer = nn.Linear(3, 1)
layer.weight.register_hook(lambda grad: grad.clamp_(-0.1, 0.1))
layer(torch.rand(4, 3)).pow(2).mean().backward()
