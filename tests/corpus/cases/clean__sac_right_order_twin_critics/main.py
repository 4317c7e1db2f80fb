import copy

import torch
from torch import nn
import torch.nn.functional as F

torch.manual_seed(256)
mk = lambda i, o: nn.Sequential(nn.Linear(i, 12), nn.ReLU(inplace=True), nn.Linear(12, o))
pi, q1, q2 = mk(3, 2), mk(4, 1), mk(4, 1)
t1, t2 = copy.deepcopy(q1), copy.deepcopy(q2)
log_alpha = torch.zeros(1, requires_grad=True)
opts = [torch.optim.Adam(p, lr=1e-3) for p in (pi.parameters(), [*q1.parameters(), *q2.parameters()], [log_alpha])]


def act(s):
    mu, ls = pi(s).chunk(2, -1)
    d = torch.distributions.Normal(mu, ls.clamp(-3, 1).exp())
    a = d.rsample()
    return a.tanh(), d.log_prob(a)


for _ in range(2):
    s, a, r, s2 = torch.randn(6, 3), torch.rand(6, 1), torch.randn(6, 1), torch.randn(6, 3)
    with torch.no_grad():
        a2, lp2 = act(s2)
        y = r + 0.9 * (torch.min(t1(torch.cat([s2, a2], 1)), t2(torch.cat([s2, a2], 1))) - log_alpha.exp() * lp2)
    sa = torch.cat([s, a], 1)
    opts[1].zero_grad()
    (F.mse_loss(q1(sa), y) + F.mse_loss(q2(sa), y)).backward()
    opts[1].step()
    na, lp = act(s)
    opts[0].zero_grad()
    (log_alpha.exp().detach() * lp - q1(torch.cat([s, na], 1))).mean().backward()
    opts[0].step()
    opts[2].zero_grad()
    (-log_alpha * (lp.detach() - 1)).mean().backward()
    opts[2].step()
    with torch.no_grad():
        for t, q in ((t1, q1), (t2, q2)):
            for tp, p in zip(t.parameters(), q.parameters()):
                tp.mul_(0.99).add_(0.01 * p)
print(f"checksum {log_alpha.item() + pi[0].weight.abs().sum().item():.6f}")
