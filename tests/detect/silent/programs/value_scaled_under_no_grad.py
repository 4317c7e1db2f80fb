import torch
from torch import nn

torch.manual_seed(0)
encoder, head = nn.Linear(4, 4), nn.Linear(4, 2)
keep = torch.tensor([1.0, 0.0, 1.0, 0.5])
hidden = encoder(torch.ones(3, 4))
with torch.no_grad():
    hidden.mul_(keep)
loss = head(hidden).pow(2).mean()
loss.backward()
