"""A generator and a critic with in-place activations and a gradient penalty."""

import torch
import torch.nn as nn

torch.manual_seed(4)
G = nn.Sequential(nn.Linear(4, 16), nn.LeakyReLU(0.2, inplace=True), nn.Linear(16, 2))
D = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2, inplace=True), nn.Linear(16, 1))
og, od = (
    torch.optim.Adam(G.parameters(), 1e-3, betas=(0.0, 0.9)),
    torch.optim.Adam(D.parameters(), 1e-3, betas=(0.0, 0.9)),
)
for it in range(4):
    for k in range(3):
        real = torch.randn(16, 2) + 2
        fake = G(torch.randn(16, 4)).detach()
        e = torch.rand(16, 1)
        x = (e * real + (1 - e) * fake).requires_grad_(True)
        (g,) = torch.autograd.grad(D(x).sum(), x, create_graph=True)
        gp = ((g.norm(2, 1) - 1) ** 2).mean()
        dl = D(fake).mean() - D(real).mean() + 10 * gp
        od.zero_grad()
        dl.backward()
        od.step()
    gl = -D(G(torch.randn(16, 4))).mean()
    og.zero_grad()
    gl.backward()
    og.step()
    print(dl.item(), gl.item())
