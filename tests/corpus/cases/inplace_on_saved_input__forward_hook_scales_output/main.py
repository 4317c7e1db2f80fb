import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.feat, self.side, self.main = nn.Linear(3, 6), nn.Linear(6, 2), nn.Linear(6, 2)

    def forward(self, x):
        h = self.feat(x)
        s = self.side(h)
        return s + self.probe(h)

    def probe(self, h):
        return self.main(h)


def halve_input(module, inputs):
    inputs[0].mul_(0.5)


torch.manual_seed(216)
net = Net()
handle = net.main.register_forward_pre_hook(halve_input)
net(torch.randn(4, 3)).pow(2).mean().backward()
print(f"checksum {net.feat.weight.grad.abs().sum().item():.6f}")
