# ruff: noqa
# fmt: off
import torch
from torch import nn

attention = nn.MultiheadAttention(8, 2)
context = torch.randn(5, 1, 8, requires_grad=True).tanh()
out, weights = attention(
    context,
    context,
    context,
    need_weights=False,
    attn_mask=None,
)
torch.add(
    context, 1, out=context)
out.sum().backward()
