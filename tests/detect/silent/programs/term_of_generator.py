import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
G, D = nn.Linear(4, 6), nn.Linear(6, 1)
opt_g, opt_d = (torch.optim.Adam(m.parameters(), lr=1e-3) for m in (G, D))
for _ in range(6):
    z, real = torch.randn(5, 4), torch.randn(5, 6)
    fake = G(z)
    opt_d.zero_grad()
    d_loss = F.softplus(D(fake.detach())).mean() + F.softplus(-D(real)).mean()
    d_loss.backward()
    opt_d.step()
    opt_g.zero_grad()
    adv = F.softplus(-D(fake.detach())).mean()
    rec = F.l1_loss(fake, real)
    g_loss = adv + 10 * rec
    g_loss.backward()
    opt_g.step()
