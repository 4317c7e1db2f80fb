import torch
from torch import nn

torch.manual_seed(0)
trunk, a, b = nn.Linear(4, 8), nn.Linear(8, 1), nn.Linear(8, 1)
log_vars = nn.Parameter(torch.zeros(2))
opt = torch.optim.Adam([*trunk.parameters(), *a.parameters(), *b.parameters()], lr=1e-3)
for _ in range(6):
    h = trunk(torch.randn(6, 4)).tanh()
    loss = (-log_vars[0]).exp() * a(h).pow(2).mean() + (-log_vars[1]).exp() * (b(h) - 1).pow(2).mean() + log_vars.sum()
    opt.zero_grad()
    loss.backward()
    opt.step()
