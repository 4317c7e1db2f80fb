"""Sparse embeddings, embeddings with ``max_norm``, and sparse layouts in products."""

import torch
import torch.nn as nn

torch.manual_seed(24)
e = nn.Embedding(50, 8, sparse=True)
eb = nn.EmbeddingBag(50, 8, mode="sum", sparse=True)
en = nn.Embedding(50, 8, max_norm=1.0)
l = nn.Linear(24, 1)
os, od = (
    torch.optim.SparseAdam([*e.parameters(), *eb.parameters()], 1e-2),
    torch.optim.Adagrad([*l.parameters(), *en.parameters()], 0.1),
)
for i in range(4):
    a = torch.randint(0, 50, (6,))
    b = torch.randint(0, 50, (6, 3))
    h = torch.cat([e(a), eb(b), en(a)], 1)
    loss = (l(h) - 1).pow(2).mean()
    os.zero_grad()
    od.zero_grad()
    loss.backward()
    os.step()
    od.step()
    print(loss.item(), e.weight.sum().item(), en.weight.sum().item())
s = torch.sparse_coo_tensor([[0, 1, 1], [2, 0, 2]], [3.0, 4.0, 5.0], (2, 3)).requires_grad_()
torch.sparse.mm(s, torch.ones(3, 2)).sum().backward()
print(s.grad.to_dense())
c = torch.randn(4, 4).relu().to_sparse_csr()
w = torch.randn(4, 2, requires_grad=True)
(c @ w).sum().backward()
print(w.grad.sum().item())
n = torch.nested.nested_tensor([torch.randn(2, 4), torch.randn(3, 4)], layout=torch.jagged, requires_grad=True)
(n * 2).sum().backward() if False else None
