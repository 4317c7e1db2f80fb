import torch
from torch import nn

torch.manual_seed(0)
net = nn.Linear(8, 8)
opt = torch.optim.SGD(net.parameters(), lr=0.01)
ema = None
for _ in range(40):
    loss = net(torch.randn(16, 8)).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    ema = loss if ema is None else 0.9 * ema + 0.1 * loss
