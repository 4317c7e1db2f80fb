"""In-place and reversible Functions that rebuild their inputs in backward."""

import torch
import torch.nn as nn

torch.manual_seed(11)


class IAct(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x.mul_(torch.where(x > 0, 1.0, 0.1))
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx, g):
        (y,) = ctx.saved_tensors
        return g * torch.where(y > 0, 1.0, 0.1)


class Rev(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, f, g, *ps):
        a, b = x.chunk(2, 1)
        with torch.no_grad():
            y1 = a + f(b)
            y2 = b + g(y1)
        ctx.f, ctx.g = f, g
        o = torch.cat([y1, y2], 1)
        ctx.save_for_backward(o)
        return o

    @staticmethod
    def backward(ctx, go):
        (o,) = ctx.saved_tensors
        y1, y2 = o.chunk(2, 1)
        d1, d2 = go.chunk(2, 1)
        f, g = ctx.f, ctx.g
        gp, fp = list(g.parameters()), list(f.parameters())
        with torch.enable_grad():
            y1 = y1.detach().requires_grad_()
            gy = g(y1)
            gg = torch.autograd.grad(gy, [y1, *gp], d2)
        with torch.no_grad():
            b = y2 - gy
            d1 = d1 + gg[0]
        with torch.enable_grad():
            b = b.detach().requires_grad_()
            fb = f(b)
            gf = torch.autograd.grad(fb, [b, *fp], d1)
        return (torch.cat([d1, d2 + gf[0]], 1), None, None, *gf[1:], *gg[1:])


f, g, l = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(8, 8)
opt = torch.optim.SGD([*f.parameters(), *g.parameters(), *l.parameters()], 0.1)
for i in range(4):
    x = torch.randn(6, 8)
    h = IAct.apply(l(x))
    h = Rev.apply(h, f, g, *f.parameters(), *g.parameters())
    s = h.pow(2).mean()
    opt.zero_grad()
    s.backward()
    opt.step()
    print(s.item())
