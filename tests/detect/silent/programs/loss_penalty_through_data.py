import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
opt = torch.optim.Adam(model.parameters(), lr=1e-2)
crit = nn.CrossEntropyLoss()
for _ in range(5):
    x, y = torch.randn(16, 5), torch.randint(0, 3, (16,))
    opt.zero_grad()
    loss = crit(model(x), y)
    l2 = sum(p.pow(2).sum() for p in model.parameters())
    loss.data += 1e-2 * l2
    loss.backward()
    opt.step()
