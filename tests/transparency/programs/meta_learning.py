"""Inner steps with ``create_graph``, by ``torch.func``, and first-order with weights loaded back."""

import torch
import torch.nn as nn
from torch.func import functional_call, grad, vmap

torch.manual_seed(8)
net = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))
opt = torch.optim.Adam(net.parameters(), 1e-2)


def f(p, x):
    return functional_call(net, p, (x,))


for it in range(3):
    meta = 0.0
    for task in range(4):
        A = torch.rand(()) + 0.5
        xs, xq = torch.randn(10, 1), torch.randn(10, 1)
        fast = dict(net.named_parameters())
        for k in range(2):
            l = (f(fast, xs) - A * xs.sin()).pow(2).mean()
            gs = torch.autograd.grad(l, fast.values(), create_graph=True)
            fast = {n: p - 0.05 * g for (n, p), g in zip(fast.items(), gs)}
        meta = meta + (f(fast, xq) - A * xq.sin()).pow(2).mean()
    opt.zero_grad()
    meta.backward()
    opt.step()
    print(meta.item())


def inner(p, xs, ys):
    return {k: p[k] - 0.05 * g for k, g in grad(lambda q: (f(q, xs) - ys).pow(2).mean())(p).items()}


def outer(p, xs, ys):
    return (f(inner(p, xs, ys), xs) - ys).pow(2).mean()


p = {k: v.detach() for k, v in net.named_parameters()}
X = torch.randn(4, 10, 1)
g = grad(lambda p: vmap(lambda x: outer(p, x, x.sin()))(X).mean())(p)
print({k: round(v.sum().item(), 6) for k, v in g.items()})
# first order (Reptile / FOMAML)
for it in range(2):
    backup = {k: v.detach().clone() for k, v in net.state_dict().items()}
    inner_opt = torch.optim.SGD(net.parameters(), 0.05)
    for k in range(3):
        x = torch.randn(10, 1)
        l = (net(x) - x.sin()).pow(2).mean()
        inner_opt.zero_grad()
        l.backward()
        inner_opt.step()
    now = {k: v.clone() for k, v in net.state_dict().items()}
    net.load_state_dict({k: backup[k] + 0.5 * (now[k] - backup[k]) for k in now})
    print(l.item())
