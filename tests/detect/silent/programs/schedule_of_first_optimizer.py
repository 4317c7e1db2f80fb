import torch
from torch import nn

torch.manual_seed(0)
net = nn.Linear(6, 2)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=12)
for epoch in range(12):
    if epoch == 1:
        opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
    loss = net(torch.randn(5, 6)).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    schedule.step()
