import torch
from torch import nn


class StreamingAttention(nn.Module):
    def __init__(self, d, slots):
        super().__init__()
        self.q, self.slots = nn.Linear(d, d), slots
        self.register_buffer("keys", torch.zeros(slots, d))
        self.register_buffer("cursor", torch.tensor(0))

    @torch.no_grad()
    def remember(self, k):
        self.keys[self.cursor] = k
        self.cursor.add_(1).remainder_(self.slots)

    def forward(self, x):
        read = (self.q(x) @ self.keys.t()).softmax(-1) @ self.keys
        self.remember(x.detach())
        return read


torch.manual_seed(226)
att = StreamingAttention(3, 4)
total = sum(att(frame).pow(2).sum() for frame in torch.randn(6, 3))
total.backward()
print(f"checksum {att.q.weight.grad.abs().sum().item():.6f}")
