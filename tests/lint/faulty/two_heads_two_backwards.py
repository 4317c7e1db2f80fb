import torch
from torch import nn
import torch.nn.functional as F


from data import get_loader

backbone = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16), nn.Tanh())
cls_head, reg_head = nn.Linear(16, 5), nn.Linear(16, 1)
params = list(backbone.parameters()) + list(cls_head.parameters()) + list(reg_head.parameters())
optimizer = torch.optim.Adam(params)
for x, label, value in get_loader():
    z = backbone(x)
    loss_cls = F.cross_entropy(cls_head(z), label)
    loss_reg = F.smooth_l1_loss(reg_head(z).squeeze(-1), value)
    optimizer.zero_grad()
    loss_cls.backward()
    loss_reg.backward()  # GS402 (maybe)
    optimizer.step()
