"""A fixed point with a hook that solves for the gradient, linear solves, a Gaussian process."""

import torch
import torch.nn as nn

torch.manual_seed(3)


class DEQ(nn.Module):
    def __init__(s):
        super().__init__()
        s.f = nn.Linear(6, 6)
        nn.init.orthogonal_(s.f.weight, 0.5)
        s.inj = nn.Linear(4, 6)

    def cell(s, z, x):
        return torch.tanh(s.f(z) + s.inj(x))

    def forward(s, x):
        with torch.no_grad():
            z = torch.zeros(len(x), 6)
            for _ in range(30):
                z = s.cell(z, x)
        z = s.cell(z, x)
        if z.requires_grad:
            z0 = z.clone().detach().requires_grad_()
            f0 = s.cell(z0, x)

            def back(g):
                y = g
                for _ in range(30):
                    y = torch.autograd.grad(f0, z0, y, retain_graph=True)[0] + g
                return y

            z.register_hook(back)
        return z


net = DEQ()
head = nn.Linear(6, 1)
opt = torch.optim.Adam([*net.parameters(), *head.parameters()], 1e-2)
for i in range(4):
    x = torch.randn(8, 4)
    l = (head(net(x)) - x.sum(1, keepdim=True)).pow(2).mean()
    opt.zero_grad()
    l.backward()
    opt.step()
    print(l.item())


class Solve(torch.autograd.Function):
    @staticmethod
    def forward(ctx, A, b):
        x = torch.linalg.solve(A, b)
        ctx.save_for_backward(A, x)
        return x

    @staticmethod
    def backward(ctx, g):
        A, x = ctx.saved_tensors
        gb = torch.linalg.solve(A.T, g)
        return -gb[:, None] * x[None], gb


A = (torch.randn(4, 4) + 4 * torch.eye(4)).requires_grad_()
b = torch.randn(4, requires_grad=True)
Solve.apply(A, b).sum().backward()
print(A.grad.sum().item(), b.grad.sum().item())
X = torch.randn(12, 2)
ls = nn.Parameter(torch.zeros(()))
y = X.sum(1)
o = torch.optim.Adam([ls], 0.1)
for i in range(4):
    K = torch.exp(-torch.cdist(X, X).pow(2) / 2 / ls.exp() ** 2) + 0.1 * torch.eye(12)
    L = torch.linalg.cholesky(K)
    al = torch.cholesky_solve(y[:, None], L)
    l = 0.5 * y @ al[:, 0] + L.diagonal().log().sum()
    o.zero_grad()
    l.backward()
    o.step()
    print(l.item())
