import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
emb, head = nn.Embedding(12, 8), nn.Linear(8, 12)
opt = torch.optim.Adam([*emb.parameters(), *head.parameters()], lr=1e-2)
for _ in range(3):
    tokens = torch.randint(1, 12, (4, 10))
    labels = tokens
    masked = torch.rand(4, 10) < 0.3
    tokens[masked] = 0
    loss = F.cross_entropy(head(emb(tokens))[masked], labels[masked])
    opt.zero_grad()
    loss.backward()
    opt.step()
