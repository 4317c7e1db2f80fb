"""An ordinary differential equation by its adjoint, and one that is unrolled into a buffer."""

import torch
import torch.nn as nn

torch.manual_seed(17)
f = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2))
flat = list(f.parameters())


class Adj(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, n, *ps):
        ctx.n = n
        with torch.no_grad():
            for _ in range(n):
                y = y + 0.1 * f(y)
        ctx.save_for_backward(y, *ps)
        return y

    @staticmethod
    def backward(ctx, g):
        y, *ps = ctx.saved_tensors
        gp = [torch.zeros_like(p) for p in ps]
        with torch.no_grad():
            for _ in range(ctx.n):
                with torch.enable_grad():
                    yy = y.detach().requires_grad_(True)
                    o = f(yy)
                    v = torch.autograd.grad(o, [yy, *ps], g, allow_unused=True)
                y = y - 0.1 * o.detach()
                g = g + 0.1 * v[0]
                for a, b in zip(gp, v[1:]):
                    a.add_(b, alpha=0.1)
        return (g, None, *gp)


opt = torch.optim.Adam(flat, 1e-2)
for i in range(4):
    y0 = torch.randn(8, 2)
    l = (Adj.apply(y0, 10, *flat) - y0.flip(1)).pow(2).mean()
    opt.zero_grad()
    l.backward()
    opt.step()
    print(l.item())


def rk4(y, h):
    k1 = f(y)
    k2 = f(y + h / 2 * k1)
    k3 = f(y + h / 2 * k2)
    k4 = f(y + h * k3)
    return y + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)


y = torch.randn(8, 2)
traj = torch.empty(11, 8, 2)
traj[0] = y
for t in range(10):
    y = rk4(y, 0.1)
    traj[t + 1] = y
l = traj.pow(2).mean()
opt.zero_grad()
l.backward()
opt.step()
print(l.item(), sum(p.grad.sum().item() for p in flat))
