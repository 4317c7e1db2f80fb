import torch
from torch import nn


class KalmanNet(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.F = nn.Parameter(torch.eye(n) + 0.05 * torch.randn(n, n))
        self.gain = nn.Linear(2, n)

    def forward(self, obs):
        steps = obs.size(1)
        state = torch.zeros(self.F.size(0), steps + 1)
        for t in range(steps):
            pred = self.F @ state[:, t]
            state[:, t + 1] = pred + self.gain(obs[:, t])
        return state[:, 1:]


torch.manual_seed(43)
filt = KalmanNet(3)
est = filt(torch.randn(2, 6))
nn.functional.mse_loss(est, torch.zeros(3, 6)).backward()
print(f"checksum {filt.F.grad.abs().sum().item():.6f}")
