import torch
from torch import nn
import torch.nn.functional as F


class Router(nn.Module):
    """routing by agreement"""

    def __init__(self, caps, dim, iters=3):
        super().__init__()
        self.W = nn.Parameter(0.01 * torch.randn(caps, dim, dim))
        self.iters = iters

    def forward(self, u):
        u_hat = torch.einsum("bid,cde->bcie", u, self.W)
        logits = torch.zeros(u.size(0), self.W.size(0), u.size(1))
        for _ in range(self.iters):
            c = logits.softmax(1)
            s = (c.unsqueeze(-1) * u_hat).sum(2)
            v = s * s.norm(dim=-1, keepdim=True) / (1 + s.pow(2).sum(-1, keepdim=True))
            logits += (u_hat * v.unsqueeze(2)).sum(-1)
        return v
