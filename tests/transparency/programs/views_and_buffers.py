"""Outputs written step by step, masks that grow, dynamic programming, weights rescaled."""

import torch
import torch.nn as nn

torch.manual_seed(12)
w = nn.Parameter(torch.randn(4, 4) * 0.3)
opt = torch.optim.SGD([w], 0.1)
bank = torch.zeros(16, 4)
ptr = 0
for i in range(5):
    h = torch.zeros(6, 4)
    hs = []
    for t in range(6):
        prev = hs[-1] if hs else torch.ones(4)
        hs.append(torch.tanh(prev @ w))
        h = h.index_put((torch.tensor([t]),), hs[-1])
    out = torch.empty(6, 4)
    for t, v in enumerate(hs):
        out[t] = v
    z = torch.zeros(3, 4)
    z[0] = out[-1]
    z[1:] += out[:2]
    z = z * 2
    z += 1
    z.add_(out[3])
    sim = torch.stack(hs) @ bank.clone().T
    l = h.pow(2).mean() + out.mean() + z.mean() + sim.mean()
    opt.zero_grad()
    l.backward()
    opt.step()
    bank[ptr : ptr + 2] = torch.stack(hs[:2]).detach()
    ptr = (ptr + 2) % 16
    print(l.item())
lo = torch.randn(5, 3, requires_grad=True)
tr = torch.randn(3, 3, requires_grad=True)
a = lo[0]
for t in range(1, 5):
    a = torch.logsumexp(a[:, None] + tr, 0) + lo[t]
torch.logsumexp(a, 0).backward()
print(tr.grad.sum().item())
x = torch.randn(4, 3, requires_grad=True)
m = torch.zeros(4, 3, dtype=torch.bool)
lp = 0
for t in range(3):
    s = x.masked_fill(m.clone(), -1e9).log_softmax(1)
    c = s.argmax(1, keepdim=True)
    lp = lp + s.gather(1, c).sum()
    m.scatter_(1, c, True)
lp.backward()
print(x.grad.sum().item())
v = x.t()[0]
u = v.unfold(0, 2, 1).sum()
u.backward()
print(x.grad.sum().item())
with torch.no_grad():
    w.div_(w.norm())
    w[0] = 0
    w.data[1].fill_(0.5)
e = (w @ w).exp().sum()
e.backward()
print(w.grad.sum().item())
kept = tr * 2
with torch.inference_mode():
    shown = (tr * 3).softmax(0)
    shown.data.mul_(2)
shown.data.clamp_(max=1.0)
kept.sum().backward()
print(shown.data.sum())
