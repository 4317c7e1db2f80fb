import copy

import torch
from torch import nn

net = nn.Linear(2, 2)
net.state = net(torch.ones(1, 2))
copy.deepcopy(net)
