import torch

weight = torch.ones(3, requires_grad=True)
optimizer = torch.optim.SGD([weight], lr=0.1)
weight = weight * 2
for _ in range(3):
    optimizer.zero_grad()
    loss = (weight.detach().requires_grad_() ** 2).sum()
    loss.backward()
    optimizer.step()
