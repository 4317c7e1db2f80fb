"""A critic with spectral, weight and orthogonal norms, and weights clipped through ``.data``."""

import torch
import torch.nn as nn
from torch.nn.utils import spectral_norm
from torch.nn.utils.parametrizations import orthogonal, weight_norm
from torch.nn.utils.parametrizations import spectral_norm as sn2

torch.manual_seed(5)
G = nn.Linear(4, 2)
D = nn.Sequential(
    spectral_norm(nn.Linear(2, 16)),
    nn.ReLU(),
    sn2(nn.Linear(16, 8)),
    nn.ReLU(),
    weight_norm(nn.Linear(8, 4)),
    orthogonal(nn.Linear(4, 4)),
    nn.Linear(4, 1),
)
og, od = torch.optim.RMSprop(G.parameters(), 1e-3), torch.optim.RMSprop(D.parameters(), 1e-3)
for it in range(4):
    z = torch.randn(16, 4)
    fake = G(z)
    od.zero_grad()
    dl = D(fake.detach()).mean() - D(torch.randn(16, 2)).mean()
    dl.backward()
    od.step()
    for p in D[-1].parameters():
        p.data.clamp_(-0.1, 0.1)
    og.zero_grad()
    gl = -D(fake).mean()
    gl.backward()
    og.step()
    print(dl.item(), gl.item())
