import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
trunk, heads = nn.Linear(6, 8), nn.ModuleList(nn.Linear(8, 1) for _ in range(3))
optimizer = torch.optim.SGD([*trunk.parameters(), *heads.parameters()], lr=0.05)
for _ in range(3):
    optimizer.zero_grad()
    features = torch.tanh(trunk(torch.randn(12, 6)))
    task_grads = []
    for head in heads:
        F.mse_loss(head(features), torch.randn(12, 1)).backward(retain_graph=True)
        task_grads.append(trunk.weight.grad)
    norms = torch.stack([one.norm() for one in task_grads])
    trunk.weight.grad = sum(one / norm for one, norm in zip(task_grads, norms, strict=True))
    optimizer.step()
