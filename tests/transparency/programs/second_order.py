"""Hessian diagonals, penalties on gradients, power iteration and conjugate gradients."""

import torch
import torch.nn as nn

torch.manual_seed(2)
net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
ps = list(net.parameters())
m = [torch.zeros_like(p) for p in ps]
h = [torch.zeros_like(p) for p in ps]
for i in range(6):
    x = torch.randn(16, 4)
    l = (net(x) - x.sum(1, keepdim=True)).pow(2).mean()
    g = torch.autograd.grad(l, ps, create_graph=True)
    z = [torch.randint_like(p, 2) * 2.0 - 1 for p in ps]
    hz = torch.autograd.grad(g, ps, z)
    for p, gi, zi, hi, a, b in zip(ps, g, z, hz, m, h):
        a.mul_(0.9).add_(gi.detach(), alpha=0.1)
        b.mul_(0.99).add_((zi * hi).abs(), alpha=0.01)
        p.data.add_(a / (b.sqrt() + 1e-2), alpha=-0.01)
    print(l.item())
for i in range(4):
    net.zero_grad()
    l = (net(x)).pow(2).mean()
    l.backward(create_graph=True)
    pen = sum(p.grad.pow(2).sum() for p in ps)
    gp = torch.autograd.grad(pen, ps)
    with torch.no_grad():
        for p, q in zip(ps, gp):
            p -= 0.01 * (p.grad + 0.1 * q)
            p.grad = None
    print(l.item())


def hvp(v):
    g = torch.autograd.grad(net(x).pow(2).mean(), ps, create_graph=True)
    return torch.autograd.grad(sum((a * b).sum() for a, b in zip(g, v)), ps)


v = [torch.randn_like(p) for p in ps]
for k in range(20):
    hv = hvp(v)
    n = sum(a.pow(2).sum() for a in hv).sqrt()
    v = [a / n for a in hv]
print(n.item())
x0 = torch.zeros(8)
r = torch.randn(8)
A = torch.randn(8, 8)
A = A @ A.T + torch.eye(8)
p = r.clone()
rs = r @ r
for k in range(8):
    Ap = A @ p
    al = rs / (p @ Ap)
    x0 += al * p
    r -= al * Ap
    rn = r @ r
    p = r + rn / rs * p
    rs = rn
print(x0.sum().item())
