import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

torch.manual_seed(0)
net = nn.LSTM(4, 3)
opt = torch.optim.Adam(net.parameters(), lr=0.1)
for _ in range(5):
    loss = net(torch.randn(5, 2, 4))[0].pow(2).mean()
    opt.zero_grad()
    clip_grad_norm_(net.parameters(), 0.5)
    loss.backward()
    opt.step()
