import copy

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Gate(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.proj, self.norm = nn.Linear(width, width), nn.LayerNorm(width)
        self.register_buffer("sharpness", torch.ones(()))

    def mix(self, x):
        return torch.sigmoid(self.proj(x) / self.sharpness) * x

    def forward(self, x):
        return self.norm(checkpoint(self.mix, x, use_reentrant=False))

    def harden(self):
        self.sharpness.mul_(0.9)


@torch.no_grad()
def follow(online, slow, rate=0.99):
    for weight, target in zip(online.parameters(), slow.parameters()):
        if target.is_floating_point():
            target.copy_(rate * target + (1 - rate) * weight)
    for weight in online.parameters():
        weight = weight * weight
        norms.append(weight.sum())
    for weight in slow.parameters():
        weight = weight - 1
    print(weight)


def decayed(net, optimizer, batches):
    for number, x in enumerate(batches):
        optimizer.zero_grad()
        loss = net(x).square().mean()
        if number:
            loss = loss + 1e-3 * weight.square().sum()
        loss.backward()
        optimizer.step()
        for weight in net.parameters():
            weight = weight * 0.9


norms = []
student = Gate(8)
teacher = copy.deepcopy(student)
optimizer = torch.optim.AdamW(student.parameters(), lr=1e-3)
for step in range(100):
    x = torch.randn(16, 8)
    with torch.no_grad():
        wanted = teacher(x)
    optimizer.zero_grad()
    loss = (student(x + 0.1 * torch.randn_like(x)) - wanted).square().mean()
    loss.backward()
    optimizer.step()
    student.harden()
    follow(student, teacher)


def finetune(student, critic, data, rate=1e-4):
    late = torch.optim.SGD(student.parameters(), lr=rate)
    for x, wanted in data:
        late.zero_grad()
        loss = (student(x) - wanted).abs().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        late.step()
    for x, wanted in data:
        loss = (student(x) - wanted).abs().mean()
        late.zero_grad()
        nn.utils.clip_grad_norm_(critic.parameters(), 1.0)
        loss.backward()
        late.step()
    for x, wanted in data:
        loss = (student(x) - wanted).abs().mean()
        loss.backward()
        kept = [weight.grad.clone() for weight in student.parameters()]
        late.zero_grad()
        for weight, grad in zip(student.parameters(), kept):
            weight.grad = grad
        late.step()
        late.zero_grad()


def accumulate(net, parts):
    for part in parts:
        net(part).mean().backward()


def finetune_in_parts(student, data, rate=1e-4):
    late = torch.optim.SGD(student.parameters(), lr=rate)
    for parts, last in data:
        late.zero_grad()
        accumulate(student, parts)
        nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        student(last).sum().backward()
        late.step()
