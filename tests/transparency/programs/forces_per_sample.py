"""Forces of every molecule in one loss; then dynamics with the trained potential."""

import torch
import torch.nn as nn

torch.manual_seed(16)
torch.set_default_dtype(torch.float64)


class Pot(nn.Module):
    def __init__(s):
        super().__init__()
        s.emb = nn.Embedding(3, 4)
        s.n = nn.Sequential(nn.Linear(4 + 8, 16), nn.SiLU(), nn.Linear(16, 1))

    def forward(s, z, r):
        d = r[:, None] - r[None]
        m = ~torch.eye(len(r), dtype=torch.bool)
        dist = (d.pow(2).sum(-1) + 1e-12).sqrt()
        rb = torch.exp(-((dist[..., None] - torch.linspace(0, 3, 8)) ** 2)) * m[..., None]
        return s.n(torch.cat([s.emb(z), rb.sum(1)], -1)).sum()


net = Pot()
opt = torch.optim.Adam(net.parameters(), 1e-3)
for ep in range(1):
    es, fs, et, ft = [], [], [], []
    for mol in range(34):
        z, r = torch.randint(0, 3, (4,)), torch.randn(4, 3, requires_grad=True)
        e = net(z, r)
        (f,) = torch.autograd.grad(e, r, create_graph=True)
        es.append(e)
        fs.append(-f)
        et.append(r.detach().pow(2).sum())
        ft.append(-2 * r.detach())
    loss = (torch.stack(es) - torch.stack(et)).pow(2).mean() + 10 * (torch.cat(fs) - torch.cat(ft)).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(loss.item())
r = torch.randn(4, 3)
v = torch.zeros(4, 3)
z = torch.tensor([0, 1, 2, 0])
for t in range(5):
    r.requires_grad_(True)
    f = -torch.autograd.grad(net(z, r), r)[0]
    with torch.no_grad():
        v += 0.01 * f
        r = r + 0.01 * v
print(r.sum().item())
torch.set_default_dtype(torch.float32)
