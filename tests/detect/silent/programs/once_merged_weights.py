import torch
import torch.nn.functional as F

torch.manual_seed(0)
base, delta = torch.randn(3, 6, requires_grad=True), torch.zeros(3, 6, requires_grad=True)
optimizer = torch.optim.SGD([base, delta], lr=0.1)
weight = base + delta
for _ in range(5):
    loss = F.cross_entropy(F.linear(torch.randn(8, 6), weight), torch.randint(3, (8,)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
