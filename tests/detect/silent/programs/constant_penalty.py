import torch
from torch import autograd, nn

torch.manual_seed(0)
D = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
opt = torch.optim.Adam(D.parameters(), lr=1e-3)


def gradient_penalty(real, fake):
    eps = torch.rand(real.size(0), 1)
    mix = (eps * real + (1 - eps) * fake).requires_grad_(True)
    out = D(mix)
    grads = autograd.grad(out, mix, torch.ones_like(out), retain_graph=True)[0]
    return ((grads.norm(2, dim=1) - 1) ** 2).mean()


for _ in range(4):
    real, fake = torch.randn(8, 2), torch.randn(8, 2) + 1
    gp = gradient_penalty(real, fake)
    loss = D(fake).mean() - D(real).mean() + 10 * gp
    opt.zero_grad()
    loss.backward()
    opt.step()
