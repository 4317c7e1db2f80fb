"""Clipped policy gradients: rollouts written into buffers, advantages normalised in place."""

import torch
import torch.nn as nn

torch.manual_seed(2)
actor, critic = (
    nn.Sequential(nn.Linear(3, 16), nn.ReLU(True), nn.Linear(16, 2)),
    nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 1)),
)
log_std = nn.Parameter(torch.zeros(2))
opt = torch.optim.Adam([*actor.parameters(), log_std, *critic.parameters()], 3e-4)
obs = torch.zeros(32, 3)
acts = torch.zeros(32, 2)
lp = torch.zeros(32)
rew = torch.zeros(32)
val = torch.zeros(33)
for it in range(1):
    with torch.no_grad():
        o = torch.randn(3)
        for t in range(32):
            obs[t] = o
            d = torch.distributions.Normal(actor(o), log_std.exp())
            a = d.sample()
            acts[t] = a
            lp[t] = d.log_prob(a).sum()
            val[t] = critic(o)
            rew[t] = -a.pow(2).sum()
            o = o * 0.9 + 0.1 * torch.randn(3)
        val[32] = critic(o)
        adv = torch.zeros(32)
        g = 0
        for t in reversed(range(32)):
            g = rew[t] + 0.99 * val[t + 1] - val[t] + 0.95 * 0.99 * g
            adv[t] = g
        ret = adv + val[:-1]
        adv -= adv.mean()
        adv /= adv.std() + 1e-8
    for ep in range(3):
        for idx in torch.randperm(32).split(16):
            d = torch.distributions.Normal(actor(obs[idx]), log_std.exp())
            ratio = (d.log_prob(acts[idx]).sum(-1) - lp[idx]).exp()
            pl = -torch.min(ratio * adv[idx], ratio.clamp(0.8, 1.2) * adv[idx]).mean()
            vl = (critic(obs[idx]).squeeze(-1) - ret[idx]).pow(2).mean()
            loss = pl + 0.5 * vl - 0.01 * d.entropy().mean()
            opt.zero_grad(set_to_none=False)
            loss.backward()
            opt.step()
    print(loss.item(), log_std.sum().item())
