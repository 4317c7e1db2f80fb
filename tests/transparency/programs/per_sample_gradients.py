"""Per-sample gradients by hooks and by loops, clipped and put into ``.grad``."""

import torch
import torch.nn as nn

torch.manual_seed(23)
net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
opt = torch.optim.SGD(net.parameters(), 0.1)
acts, psg = {}, {}


def fwd(m, i, o):
    acts[m] = i[0].detach()


def bwd(m, gi, go):
    psg[m] = torch.einsum("no,ni->noi", go[0] * len(go[0]), acts[m])


hs = [
    h
    for m in net
    if isinstance(m, nn.Linear)
    for h in (m.register_forward_hook(fwd), m.register_full_backward_hook(bwd))
]
for i in range(3):
    x, y = torch.randn(8, 4), torch.randint(0, 2, (8,))
    l = nn.functional.cross_entropy(net(x), y)
    opt.zero_grad()
    l.backward()
    n = sum(g.flatten(1).pow(2).sum(1) for g in psg.values()).sqrt()
    c = (1 / (n + 1e-6)).clamp(max=1.0)
    for m, g in psg.items():
        m.weight.grad = torch.einsum("n,noi->oi", c, g) / 8
        m.weight.grad.add_(torch.randn_like(m.weight) * 0.01)
    opt.step()
    print(l.item(), n.sum().item())
for h in hs:
    h.remove()
for i in range(3):
    opt.zero_grad()
    acc = [torch.zeros_like(p) for p in net.parameters()]
    for k in range(4):
        net.zero_grad()
        nn.functional.cross_entropy(net(torch.randn(1, 4)), torch.tensor([k % 2])).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        for a, p in zip(acc, net.parameters()):
            a += p.grad
    for a, p in zip(acc, net.parameters()):
        p.grad = a / 4
    opt.step()
    print(sum(p.sum().item() for p in net.parameters()))
