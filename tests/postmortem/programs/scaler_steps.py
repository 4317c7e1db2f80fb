# GS111 model.2.weight
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
scaler = torch.amp.GradScaler("cpu")
loss = torch.zeros(())
for _ in range(4):
    x = torch.randn(8, 4)
    loss = loss + model(x).pow(2).mean()  # saved
    scaler.scale(loss).backward(retain_graph=True)  # used
    scaler.step(optimizer)  # written
    scaler.update()
    optimizer.zero_grad()
