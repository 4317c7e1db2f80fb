"""Hooks of all kinds, gradients reversed, and a perturbation updated through ``.data``."""

import torch
import torch.nn as nn

torch.manual_seed(28)


class GRL(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, l):
        ctx.l = l
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return -ctx.l * g, None


f, c, d = nn.Linear(4, 8), nn.Linear(8, 2), nn.Linear(8, 2)
opt = torch.optim.SGD([*f.parameters(), *c.parameters(), *d.parameters()], 0.1)
norms = []
f.weight.register_hook(lambda g: g.clamp(-1, 1))
f.weight.register_post_accumulate_grad_hook(lambda p: norms.append(p.grad.norm().item()))
feats = {}
c.register_forward_pre_hook(lambda m, a: (a[0] * 1.0,))
f.register_forward_hook(lambda m, i, o: feats.__setitem__("f", o))
for i in range(4):
    x = torch.randn(8, 4)
    h = f(x).relu()
    h.retain_grad()
    l = nn.functional.cross_entropy(c(h), torch.randint(0, 2, (8,))) + nn.functional.cross_entropy(
        d(GRL.apply(h, 0.5)), torch.randint(0, 2, (8,))
    )
    opt.zero_grad()
    l.backward()
    opt.step()
    print(l.item(), norms[-1], h.grad.sum().item(), feats["f"].sum().item())
act = {}
g = {}
net = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 2))
net[0].register_forward_hook(lambda m, i, o: act.update(a=o.detach().clone()))
net[0].register_full_backward_hook(lambda m, gi, go: g.update(g=go[0].clone()))
net(torch.randn(1, 1, 8, 8))[0, 1].backward()
cam = (g["g"].mean((2, 3), keepdim=True) * act["a"]).sum(1).relu()
cam /= cam.max() + 1e-8
print(cam.sum().item())
adv = torch.randn(2, 1, 8, 8)
delta = torch.zeros_like(adv, requires_grad=True)
for k in range(4):
    l = nn.functional.cross_entropy(net(adv + delta), torch.tensor([0, 1]))
    l.backward()
    delta.data = (delta + 0.1 * delta.grad.detach().sign()).clamp(-0.3, 0.3)
    delta.data = (adv + delta.data).clamp(-1, 1) - adv
    delta.grad.zero_()
print(delta.sum().item())
