import torch

weight = torch.ones(3, requires_grad=True)
rows = torch.zeros(2, 3)
for row in rows.unbind():
    row.add_(weight)
rows.sum().backward()
