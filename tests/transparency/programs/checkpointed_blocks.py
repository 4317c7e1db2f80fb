"""Attention blocks with dropout and a call counter in every form of checkpoint."""

import functools

import torch
import torch.nn as nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

torch.manual_seed(19)


class Block(nn.Module):
    def __init__(s):
        super().__init__()
        s.a = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)
        s.n = nn.LayerNorm(8)
        s.f = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 8))
        s.seen = 0

    def forward(s, x, mask=None):
        s.seen += 1
        h = s.n(x)
        x = x + s.a(h, h, h, attn_mask=mask, need_weights=False)[0]
        return x + s.f(x)


blocks = nn.ModuleList(Block() for _ in range(3))
opt = torch.optim.AdamW(blocks.parameters(), 1e-3)
for r in (True, False):
    for i in range(2):
        x = torch.randn(2, 5, 8, requires_grad=True)
        m = torch.triu(torch.ones(5, 5, dtype=torch.bool), 1)
        h = x
        for b in blocks:
            h = checkpoint(b, h, m, use_reentrant=r)
        l = h.pow(2).mean()
        opt.zero_grad()
        l.backward()
        opt.step()
        print(l.item(), x.grad.sum().item())
h = checkpoint_sequential(nn.Sequential(*blocks), 2, torch.randn(2, 5, 8, requires_grad=True), use_reentrant=False)
h.sum().backward()
print(h.sum().item())


def pol(ctx, op, *a, **k):
    return (
        CheckpointPolicy.MUST_SAVE
        if op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        else CheckpointPolicy.PREFER_RECOMPUTE
    )


h = checkpoint(
    blocks[0],
    torch.randn(2, 5, 8, requires_grad=True),
    use_reentrant=False,
    context_fn=functools.partial(create_selective_checkpoint_contexts, pol),
)
h.sum().backward()
print(h.sum().item(), sum(p.grad.sum().item() for p in blocks[0].parameters()))
