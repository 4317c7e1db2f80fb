import torch
from torch import nn

torch.manual_seed(115)
cell, head = nn.GRUCell(2, 4), nn.Linear(4, 1)
seq, h = torch.randn(5, 3, 2), torch.zeros(3, 4)
outputs = torch.zeros(5, 3, 1)
for t, x in enumerate(seq):
    h = cell(x, h)
    outputs[t] = head(h)
outputs.pow(2).sum().backward()
print(f"checksum {cell.weight_ih.grad.abs().sum().item():.6f}")
