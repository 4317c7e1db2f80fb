import torch
import torch.nn.functional as F
from torch import nn


class PeakNormaliser(nn.Module):
    def forward(self, wave):
        wave.div_(wave.abs().amax(-1, keepdim=True))
        return wave


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.normalise, self.mix = PeakNormaliser(), nn.Linear(8, 8)

    def forward(self, signal):
        change = self.mix(self.normalise(signal))
        return signal + change


torch.manual_seed(0)
net = Denoiser()
for _ in range(2):
    loss = F.l1_loss(net(torch.randn(4, 8)), torch.randn(4, 8))
    loss.backward()
