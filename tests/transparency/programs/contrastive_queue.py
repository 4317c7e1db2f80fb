"""A momentum encoder replaced through ``.data`` and a queue written after it was read."""

import copy

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(14)


class Moco(nn.Module):
    def __init__(s, K=32, m=0.9, T=0.1):
        super().__init__()
        s.q = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(inplace=True), nn.Linear(16, 8))
        s.k = copy.deepcopy(s.q)
        s.K, s.m, s.T = K, m, T
        for p in s.k.parameters():
            p.requires_grad = False
        s.register_buffer("queue", F.normalize(torch.randn(8, K), dim=0))
        s.register_buffer("ptr", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def _up(s):
        for a, b in zip(s.q.parameters(), s.k.parameters()):
            b.data = b.data * s.m + a.data * (1 - s.m)

    @torch.no_grad()
    def _enq(s, k):
        i = int(s.ptr)
        s.queue[:, i : i + len(k)] = k.T
        s.ptr[0] = (i + len(k)) % s.K

    def forward(s, a, b):
        q = F.normalize(s.q(a), dim=1)
        with torch.no_grad():
            s._up()
            perm = torch.randperm(len(b))
            k = F.normalize(s.k(b[perm]), dim=1)[torch.argsort(perm)]
        lp = torch.einsum("nc,nc->n", q, k)[:, None]
        ln = torch.einsum("nc,ck->nk", q, s.queue.clone().detach())
        lo = torch.cat([lp, ln], 1) / s.T
        s._enq(k)
        return lo, torch.zeros(len(a), dtype=torch.long)


net = Moco()
opt = torch.optim.SGD(net.parameters(), 0.03, momentum=0.9, weight_decay=1e-4)
for i in range(6):
    x = torch.randn(8, 6)
    lo, y = net(x + 0.1 * torch.randn_like(x), x + 0.1 * torch.randn_like(x))
    l = F.cross_entropy(lo, y)
    opt.zero_grad()
    l.backward()
    opt.step()
    print(l.item(), net.queue.sum().item())
