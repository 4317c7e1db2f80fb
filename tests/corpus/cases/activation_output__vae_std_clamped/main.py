from dataclasses import dataclass

import torch
from torch import nn
import torch.nn.functional as F


@dataclass
class Posterior:
    mu: torch.Tensor
    std: torch.Tensor

    def rsample(self):
        return self.mu + self.std * torch.randn_like(self.std)


class VAE(nn.Module):
    def __init__(self, d=6, z=3):
        super().__init__()
        self.enc, self.dec = nn.Linear(d, 2 * z), nn.Linear(z, d)

    def encode(self, x):
        mu, logvar = self.enc(x).chunk(2, -1)
        return Posterior(mu, (0.5 * logvar).exp())

    def forward(self, x):
        q = self.encode(x)
        q.std.clamp_(min=1e-3, max=0.9)
        return self.dec(q.rsample()), q


torch.manual_seed(3)
vae = VAE()
x = torch.randn(12, 6)
recon, q = vae(x)
kl = -torch.log(q.std).sum(-1).mean()
(F.mse_loss(recon, x) + 0.1 * kl).backward()
print(f"checksum {vae.enc.weight.grad.abs().sum().item():.6f}")
