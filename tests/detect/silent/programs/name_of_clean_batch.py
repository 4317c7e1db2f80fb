import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
net = nn.Linear(6, 6)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(3):
    clean = torch.randn(4, 6)
    noisy = clean.add_(0.1 * torch.randn(4, 6))
    loss = F.mse_loss(net(noisy), clean)
    opt.zero_grad()
    loss.backward()
    opt.step()
