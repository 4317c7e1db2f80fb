import torch
from torch import nn
import torch.nn.functional as F


class Critic(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(dim, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))

    def forward(self, x):
        return self.net(x)


def gradient_penalty(critic, real, fake):
    alpha = torch.rand(real.size(0), 1)
    mixed = (alpha * real + (1 - alpha) * fake).requires_grad_(True)
    score = critic(mixed)
    grads = torch.autograd.grad(outputs=score, inputs=mixed, grad_outputs=torch.ones_like(score), create_graph=True)[0]
    return ((grads.norm(2, dim=1) - 1) ** 2).mean()


critic = Critic(8)
opt = torch.optim.Adam(critic.parameters(), lr=1e-4)
for _ in range(5):
    real, fake = torch.randn(4, 8), torch.randn(4, 8)
    loss = critic(fake).mean() - critic(real).mean() + 10 * gradient_penalty(critic, real, fake)
    opt.zero_grad()
    loss.backward()
    opt.step()
