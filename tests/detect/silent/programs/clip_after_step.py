import torch
from torch import nn

torch.manual_seed(0)
net = nn.Linear(4, 3)
opt = torch.optim.Adam(net.parameters(), lr=0.1)
for _ in range(5):
    opt.zero_grad()
    net(torch.randn(5, 4)).pow(2).mean().backward()
    opt.step()
    nn.utils.clip_grad_value_(net.parameters(), clip_value=0.01)
