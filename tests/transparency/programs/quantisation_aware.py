"""Fake quantisation with straight-through gradients and observers that update themselves."""

import torch
import torch.nn as nn

torch.manual_seed(13)


class STE(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, s, lo, hi):
        q = (x / s).round()
        ctx.save_for_backward((q >= lo) & (q <= hi))
        return q.clamp_(lo, hi) * s

    @staticmethod
    def backward(ctx, g):
        (m,) = ctx.saved_tensors
        return g * m, None, None, None


class Fake(nn.Module):
    def __init__(s):
        super().__init__()
        s.register_buffer("mx", torch.ones(()))
        s.register_buffer("init", torch.tensor(False))

    def forward(s, x):
        if s.training:
            with torch.no_grad():
                m = x.abs().max()
                if not s.init:
                    s.mx.copy_(m)
                    s.init.fill_(True)
                else:
                    s.mx.mul_(0.9).add_(0.1 * m)
        return STE.apply(x, s.mx / 127, -128, 127)


class QLinear(nn.Linear):
    def __init__(s, *a):
        super().__init__(*a)
        s.qw, s.qa = Fake(), Fake()

    def forward(s, x):
        return nn.functional.linear(s.qa(x), s.qw(s.weight), s.bias)


net = nn.Sequential(QLinear(4, 16), nn.ReLU(), QLinear(16, 1))
opt = torch.optim.Adam(net.parameters(), 1e-2)
for i in range(5):
    x = torch.randn(16, 4)
    l = (net(x) - x.sum(1, keepdim=True)).pow(2).mean()
    opt.zero_grad()
    l.backward()
    opt.step()
    print(l.item(), net[0].qa.mx.item())
w = nn.Parameter(torch.randn(1, 4))
wq = w + (w.round() - w).detach()
wq.pow(2).sum().backward()
print(w.grad)
s = nn.Parameter(torch.tensor([0.1]))
z = nn.Parameter(torch.tensor([0.0]))
y = torch.fake_quantize_per_tensor_affine(w, 0.1, 0, -128, 127)
y.sum().backward()
print(w.grad)
y = torch._fake_quantize_learnable_per_tensor_affine(w, s, z, -128, 127, 1.0)
y.sum().backward()
print(s.grad, z.grad)
