import torch
from torch import nn

torch.manual_seed(0)
net = nn.Linear(4, 1)
buffers = None
for _ in range(5):
    net.zero_grad(set_to_none=False)
    net(torch.randn(8, 4)).pow(2).mean().backward()
    with torch.no_grad():
        if buffers is None:
            buffers = [p.grad for p in net.parameters()]
        for p, buffer in zip(net.parameters(), buffers, strict=True):
            buffer.mul_(0.9).add_(p.grad)
            p -= 0.1 * buffer
