"""Optimizers of the user's own, two-step ones, with closures, foreach and fused."""

import torch
import torch.nn as nn

torch.manual_seed(18)


class Lion(torch.optim.Optimizer):
    def __init__(s, ps, lr=1e-3, betas=(0.9, 0.99), wd=0.0):
        super().__init__(ps, dict(lr=lr, betas=betas, wd=wd))

    @torch.no_grad()
    def step(s, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for g in s.param_groups:
            for p in g["params"]:
                if p.grad is None:
                    continue
                p.data.mul_(1 - g["lr"] * g["wd"])
                st = s.state[p]
                if not st:
                    st["m"] = torch.zeros_like(p)
                u = st["m"].clone().mul_(g["betas"][0]).add(p.grad, alpha=1 - g["betas"][0]).sign_()
                p.add_(u, alpha=-g["lr"])
                st["m"].mul_(g["betas"][1]).add_(p.grad, alpha=1 - g["betas"][1])
        return loss


class SAM(torch.optim.Optimizer):
    def __init__(s, ps, base, rho=0.05, **k):
        super().__init__(ps, dict(rho=rho, **k))
        s.base = base(s.param_groups, **k)
        s.param_groups = s.base.param_groups

    @torch.no_grad()
    def first(s):
        n = torch.norm(torch.stack([p.grad.norm() for g in s.param_groups for p in g["params"]]))
        for g in s.param_groups:
            for p in g["params"]:
                e = p.grad * (s.defaults["rho"] / (n + 1e-12))
                s.state[p]["e"] = e
                p.add_(e)

    @torch.no_grad()
    def second(s):
        for g in s.param_groups:
            for p in g["params"]:
                p.sub_(s.state[p]["e"])
        s.base.step()

    def step(s, closure):
        closure = torch.enable_grad()(closure)
        l = closure()
        s.first()
        s.zero_grad()
        closure()
        s.second()
        return l


net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
x = torch.randn(16, 4)
y = x.sum(1, keepdim=True)
for opt in (
    Lion(net.parameters(), 1e-2, wd=0.1),
    SAM(net.parameters(), torch.optim.SGD, lr=0.05),
    torch.optim.LBFGS(net.parameters(), max_iter=4, line_search_fn="strong_wolfe"),
    torch.optim.Adam(net.parameters(), foreach=True),
    torch.optim.AdamW(net.parameters(), fused=True),
    torch.optim.Rprop(net.parameters()),
):
    for i in range(3):

        def closure():
            opt.zero_grad()
            l = (net(x) - y).pow(2).mean()
            l.backward()
            return l

        print(type(opt).__name__, float(opt.step(closure)))
