import torch

scale = torch.tensor([[0.5], [2.0]], requires_grad=True)
rows = scale.exp().expand(2, 3)
columns = torch.ones(1, 3).mul(scale.sum()).expand(2, 3)
for margin in (rows, columns):
    margin[margin < 1.8] = 1.8
(rows / columns).sum().backward()
