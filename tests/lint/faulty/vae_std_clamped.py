import torch
from torch import nn
import torch.nn.functional as F


class VAE(nn.Module):
    def __init__(self, d, z):
        super().__init__()
        self.enc = nn.Linear(d, 2 * z)
        self.dec = nn.Linear(z, d)

    def forward(self, x):
        mu, logvar = self.enc(x).chunk(2, dim=-1)
        std = torch.exp(0.5 * logvar)
        std += 1e-4  # GS101
        z = mu + std * torch.randn_like(std)
        return self.dec(z), mu, logvar
