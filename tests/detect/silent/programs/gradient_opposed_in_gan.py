"""A discriminator's loss reaches the generator, whose gradients nobody clears before its own loss."""

import torch
from torch import nn

torch.manual_seed(0)
generator = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16))
discriminator = nn.Sequential(nn.Linear(16, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
g_optimizer = torch.optim.Adam(generator.parameters(), lr=2e-4)
d_optimizer = torch.optim.Adam(discriminator.parameters(), lr=2e-4)
criterion = nn.BCEWithLogitsLoss()

for _ in range(6):
    g_optimizer.zero_grad()
    d_optimizer.zero_grad()
    real = torch.rand(16, 16)
    fake = generator(torch.randn(16, 8))
    d_loss = criterion(discriminator(real), torch.ones(16, 1)) + criterion(discriminator(fake), torch.zeros(16, 1))
    d_loss.backward()
    d_optimizer.step()

    fake = generator(torch.randn(16, 8))
    g_loss = criterion(discriminator(fake), torch.ones(16, 1))
    g_loss.backward()
    g_optimizer.step()
