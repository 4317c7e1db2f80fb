import torch
from torch import nn

torch.manual_seed(0)
encoder, head = nn.Linear(3, 3), nn.Linear(3, 1)
optimizer = torch.optim.SGD(encoder.parameters(), lr=0.1)
for _ in range(3):
    optimizer.zero_grad()
    with torch.no_grad():
        code = encoder(torch.randn(5, 3))
    head(code).pow(2).mean().backward()
    optimizer.step()
