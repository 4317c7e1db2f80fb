import torch
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))
opt = torch.optim.Adam(net.parameters(), lr=1e-3)
for _ in range(4):
    t = torch.linspace(0, 2, 6).view(-1, 1).requires_grad_()
    u = net(t)
    u_t = torch.autograd.grad(u, t, torch.ones_like(u), retain_graph=True)[0]
    residual = u_t + 0.5 * u
    loss = residual.pow(2).mean() + (net(torch.zeros(1, 1)) - 1).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
