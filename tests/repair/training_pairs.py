"""Broken programs, each with a patch that keeps its training and one that does harm, both made by hand.

The lines that begin with ``-`` are those of the broken program, those with ``+`` the right ones, those with ``!`` the
harmful ones; all others are in all three.
"""

from __future__ import annotations

import textwrap
from typing import NamedTuple

HEAD = """
import torch
from torch import nn
torch.manual_seed(0)
"""
ACTOR_CRITIC = """
actor, critic = nn.Linear(3, 2), nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))
critic_opt = torch.optim.SGD(critic.parameters(), lr=0.1)
actor_opt = torch.optim.SGD(actor.parameters(), lr=0.1)
"""


class Pair(NamedTuple):
    """``right`` and ``harmful`` are new texts; ``lost`` is what the verdict on the harmful one names."""

    broken: str
    right: str
    harmful: str
    lost: str
    verdict: str = "rejected"


def pair(text: str, lost: str, verdict: str = "rejected") -> Pair:
    rows = textwrap.dedent(text).splitlines()
    texts = [_with(rows, mark) for mark in "-+!"]
    return Pair(*(HEAD + one for one in texts), lost=lost, verdict=verdict)


def _with(rows: list[str], mark: str) -> str:
    kept = (row for row in rows if row[:1] not in "-+!" or row[:1] == mark or not row)
    return "".join(f"{row[1:] if row[:1] == mark and row else row}\n" for row in kept)


PAIRS = {
    # A function that has ended knew by a name of its own what the module goes on with.
    "temperature_of_a_function": pair(
        """
class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(3, 1)
        self.register_buffer("heat", torch.tensor(2.0))

    def forward(self, x):
        return (self.lin(x) * self.heat).tanh()

def fit(layer, opt):
    for _ in range(3):
        loss = layer(torch.randn(5, 3)).sum()
-        layer.heat.mul_(0.5)
        opt.zero_grad()
        loss.backward()
+        layer.heat.mul_(0.5)
!        heat = layer.heat.mul(0.5)
        opt.step()

net = Layer()
fit(net, torch.optim.SGD(net.parameters(), lr=0.1))
""",
        "heat",
    ),
    # A backward that is traced is none of the program's.
    "compiled": pair(
        """
class Gate(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x):
        h = torch.sigmoid(self.layer(x))
        y = x * h
-        h.add_(1.0)
+        h = h + 1.0
        return y.sum() + h.mean()

net = torch.compile(Gate(), backend="aot_eager")
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(3):
    opt.zero_grad()
    net(torch.randn(5, 3)).backward()
    opt.step()
""",
        "loss",
        "gradients",
    ),
    # What the layer is told is text of the program, and no part of its training.
    "in_place_layer": pair(
        """
-net = nn.Sequential(nn.Linear(3, 4), nn.Sigmoid(), nn.Hardtanh(0.4, 0.6, inplace=True), nn.Linear(4, 1))
+net = nn.Sequential(nn.Linear(3, 4), nn.Sigmoid(), nn.Hardtanh(0.4, 0.6, inplace=False), nn.Linear(4, 1))
!net = nn.Sequential(nn.Linear(3, 4), nn.Sigmoid(), nn.Hardtanh(0.0, 1.0, inplace=False), nn.Linear(4, 1))
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(4):
    opt.zero_grad()
    net(torch.randn(5, 3)).pow(2).mean().backward()
    opt.step()
""",
        "gradients",
        "changed",
    ),
    # The next backward adds to a gradient that was kept by reference: the critic learns from both losses.
    "gradients_kept_by_reference": pair(
        ACTOR_CRITIC
        + """
for _ in range(4):
    action = actor(torch.randn(5, 3))
    value = critic(action)
    pairs = [(critic_opt, (value - 1).pow(2).mean()), (actor_opt, -value.mean())]
    pending = []
    for opt, loss in pairs:
        opt.zero_grad()
        loss.backward(retain_graph=True)
-        opt.step()
+        pending.append((opt, [(p, p.grad.clone()) for g in opt.param_groups for p in g["params"]]))
!        pending.append((opt, [(p, p.grad) for g in opt.param_groups for p in g["params"]]))
    for opt, kept in pending:
        for p, grad in kept:
            p.grad = grad
        opt.step()
""",
        "pending",
    ),
    # A name bound anew in a hook that returns nothing: the clip is gone.
    "clip_in_a_hook": pair(
        """
net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
opt = torch.optim.SGD(net.parameters(), lr=0.1)
branch = nn.Linear(4, 1)

def clip(grad):
-    grad.clamp_(-0.01, 0.01)
+    return grad.clamp(-0.01, 0.01)
!    grad = grad.clamp(-0.01, 0.01)

for _ in range(4):
    hidden = net[0](torch.randn(5, 3))
    other = hidden * 1
    other.register_hook(clip)
    loss = (net[2](net[1](hidden)) + net[2](other)).sum()
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
        "GS223",
    ),
    # Parameters are views of a flat buffer: bound anew, they view the old one.
    "flat_buffer": pair(
        """
net = nn.Linear(3, 2)

class Flat:
    def __init__(self, net):
        self.flat = torch.cat([p.detach().reshape(-1) for p in net.parameters()])
        start = 0
        for p in net.parameters():
            p.data = self.flat[start : start + p.numel()].view_as(p)
            start += p.numel()
        self.net = net

    @torch.no_grad()
    def step(self):
        grad = torch.cat([p.grad.reshape(-1) for p in self.net.parameters()])
!        self.flat = self.flat.addcdiv(grad, torch.full_like(grad, -10.0))
-        self.flat.addcdiv_(grad, torch.full_like(grad, -10.0))
+        self.flat.addcdiv_(grad, torch.full_like(grad, -10.0))

opt = Flat(net)
for _ in range(4):
    x = torch.randn(4, 3)
    hidden = net(x).sigmoid()
    net.zero_grad()
    loss = hidden.pow(2).sum()
-    hidden.data
-    hidden *= 2
+    hidden = hidden * 2
!    hidden = hidden * 2
    loss.backward()
    opt.step()
""",
        "net.weight",
    ),
    # A local name: the caller's bank is never filled.
    "bank_of_a_function": pair(
        """
encoder = nn.Linear(3, 4)
opt = torch.optim.SGD(encoder.parameters(), lr=0.1)
bank = torch.zeros(8, 4)

def enqueue(bank, keys, at):
-    bank[at : at + 2] = keys
+    bank[at : at + 2] = keys
!    bank = bank.slice_scatter(keys, 0, at, at + 2)

for step in range(4):
    query = encoder(torch.randn(2, 3))
-    scores = query @ bank.t()
+    scores = query @ bank.clone().t()
!    scores = query @ bank.t()
    enqueue(bank, query.detach(), 2 * step)
    loss = scores.pow(2).sum() + query.sum()
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
        "bank",
    ),
    # The average follows the parameters that the step has made; moved past it, it follows the old ones.
    "average_before_the_step": pair(
        """
net, critic = nn.Linear(3, 2), nn.Linear(2, 1)
net_opt, critic_opt = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (net, critic))
average = {name: p.detach().clone() for name, p in critic.named_parameters()}
for _ in range(4):
    hidden = net(torch.randn(5, 3))
    score = critic(hidden)
    critic_opt.zero_grad()
    (score - 1).pow(2).mean().backward(retain_graph=True, inputs=list(critic.parameters()))
-    critic_opt.step()
-    for name, p in critic.named_parameters():
-        average[name].lerp_(p.detach(), 0.5)
!    for name, p in critic.named_parameters():
!        average[name].lerp_(p.detach(), 0.5)
    net_opt.zero_grad()
    (-score.mean()).backward(inputs=list(net.parameters()))
+    critic_opt.step()
+    for name, p in critic.named_parameters():
+        average[name].lerp_(p.detach(), 0.5)
!    critic_opt.step()
    net_opt.step()
""",
        "average",
    ),
    "target_network_before_the_step": pair(
        """
net, critic, target = nn.Linear(3, 2), nn.Linear(2, 1), nn.Linear(2, 1)
net_opt, critic_opt = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (net, critic))
for _ in range(4):
    hidden = net(torch.randn(5, 3))
    score = critic(hidden)
    critic_opt.zero_grad()
    (score - 1).pow(2).mean().backward(retain_graph=True, inputs=list(critic.parameters()))
-    critic_opt.step()
-    target.load_state_dict(critic.state_dict())
!    target.load_state_dict(critic.state_dict())
    net_opt.zero_grad()
    (-score.mean()).backward(inputs=list(net.parameters()))
+    critic_opt.step()
+    target.load_state_dict(critic.state_dict())
!    critic_opt.step()
    net_opt.step()
""",
        "target.weight",
    ),
    "best_weights_before_the_step": pair(
        """
class Run:
    pass

run = Run()
net, critic = nn.Linear(3, 2), nn.Linear(2, 1)
net_opt, critic_opt = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (net, critic))
for _ in range(4):
    score = critic(net(torch.randn(5, 3)))
    critic_opt.zero_grad()
    (score - 1).pow(2).mean().backward(retain_graph=True, inputs=list(critic.parameters()))
-    critic_opt.step()
!    run.best = {k: v.clone() for k, v in critic.state_dict().items()}
-    run.best = {k: v.clone() for k, v in critic.state_dict().items()}
    net_opt.zero_grad()
    (-score.mean()).backward(inputs=list(net.parameters()))
+    critic_opt.step()
+    run.best = {k: v.clone() for k, v in critic.state_dict().items()}
!    critic_opt.step()
    net_opt.step()
""",
        "run.best",
    ),
    # A new leaf: the optimizer goes on with the old one.
    "leaf_made_anew": pair(
        """
table = torch.randn(4, 3, requires_grad=True)
opt = torch.optim.SGD([table], lr=0.1)
for _ in range(4):
    rows = table.exp()
-    rows.mul_(2)
+    rows = rows.mul(2)
!    rows = rows.mul(2)
!    table = (table * 1).detach().requires_grad_()
    loss = rows.sum()
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
        "gradients are lost",
    ),
    "parameter_replaced": pair(
        """
net = nn.Linear(3, 2)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(4):
    hidden = net(torch.randn(4, 3)).sigmoid()
-    hidden += 1
+    hidden = hidden + 1
!    hidden = hidden + 1
    opt.zero_grad()
    hidden.sum().backward()
!    if step == 0:
!        net.weight = nn.Parameter(net.weight.detach().clone())
    opt.step()
""",
        "gradients are lost",
    ),
    "statistics_of_a_holder": pair(
        """
class Normaliser:
    def __init__(self):
        self.mean = torch.zeros(3)

    def update(self, x):
-        self.mean.lerp_(x.mean(0), 0.1)
+        self.mean.lerp_(x.mean(0), 0.1)
!        self.mean = self.mean.lerp(x.mean(0), 0.1)

normaliser = Normaliser()
shared = {"mean": normaliser.mean}
net = nn.Linear(3, 2)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(4):
    x = torch.randn(4, 3) + 1
    scaled = net.weight * normaliser.mean
-    normaliser.update(x)
!    normaliser.update(x)
    loss = net(x).sum() + scaled.sum()
    opt.zero_grad()
    loss.backward()
+    normaliser.update(x)
    opt.step()
""",
        "shared",
    ),
    "batch_of_a_loader_drawn_again": pair(
        """
from torch.utils.data import DataLoader, TensorDataset

net = nn.Linear(3, 2)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
batches = iter(DataLoader(TensorDataset(torch.randn(40, 3)), batch_size=4))
for _ in range(4):
    (x,) = next(batches)
    hidden = net(x).sigmoid()
-    hidden += 1
+    hidden = hidden + 1
!    (x,) = next(batches)
!    hidden = net(x).sigmoid() + 1
    opt.zero_grad()
    hidden.sum().backward()
    opt.step()
""",
        "batches",
    ),
    "noise_drawn_again": pair(
        """
net = nn.Linear(3, 2)
opt = torch.optim.SGD(net.parameters(), lr=0.1)

def sample():
    return torch.randn(4, 3)

for _ in range(4):
    hidden = net(sample()).sigmoid()
-    hidden += 1
+    hidden = hidden + 1
!    hidden = net(sample()).sigmoid() + 1
    opt.zero_grad()
    hidden.sum().backward()
    opt.step()
""",
        "random numbers",
    ),
    "counted_twice": pair(
        """
class Trainer:
    seen = 0

trainer = Trainer()
trainer.seen = 0
net = nn.Linear(3, 2)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(4):
    hidden = net(torch.randn(4, 3)).sigmoid()
    trainer.seen += 4
-    hidden += 1
+    hidden = hidden + 1
!    hidden = hidden + 1
!    trainer.seen += 4
    opt.zero_grad()
    hidden.sum().backward()
    opt.step()
""",
        "trainer.seen",
    ),
    "replay_of_numpy_not_filled": pair(
        """
import numpy

class Replay:
    def __init__(self):
        self.rows = numpy.zeros((8, 2), dtype="float32")

def remember(rows, at, values):
-    rows[at] = values
+    rows[at] = values
!    rows = numpy.where(numpy.arange(8)[:, None] == at, values, rows)

replay = Replay()
net = nn.Linear(3, 2)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(4):
    hidden = net(torch.randn(1, 3)).sigmoid()
    remember(replay.rows, step, hidden.detach().numpy()[0])
-    hidden += 1
+    hidden = hidden + 1
!    hidden = hidden + 1
    opt.zero_grad()
    hidden.sum().backward()
    opt.step()
""",
        "replay.rows",
    ),
    "schedule_of_another_step": pair(
        """
net = nn.Linear(3, 2)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
schedule = torch.optim.lr_scheduler.StepLR(opt, 1, 0.5)
for _ in range(4):
    hidden = net(torch.randn(4, 3)).sigmoid()
-    hidden += 1
+    hidden = hidden + 1
!    hidden = hidden + 1
    opt.zero_grad()
    hidden.sum().backward()
    opt.step()
-    schedule.step()
+    schedule.step()
""",
        "gradients",
        "changed",
    ),
    "failing_later": pair(
        """
net = nn.Linear(3, 2)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(4):
    hidden = net(torch.randn(4, 3)).sigmoid()
-    hidden += 1
+    hidden = hidden + 1
!    hidden = hidden + 1
    opt.zero_grad()
    hidden.sum().backward()
!    opt.step(None, None)
    opt.step()
""",
        "main.py",
    ),
    "another_conflict": pair(
        """
net = nn.Linear(3, 2)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(4):
    hidden = net(torch.randn(4, 3)).sigmoid()
-    hidden += 1
+    hidden = hidden + 1
!    hidden = hidden.exp()
!    hidden.data.mul_(2)
    opt.zero_grad()
    hidden.sum().backward()
    opt.step()
""",
        "GS202",
    ),
    "printed_again": pair(
        """
net = nn.Linear(3, 2)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(4):
    hidden = net(torch.randn(4, 3)).sigmoid()
-    hidden += 1
+    hidden = hidden + 1
!    hidden = hidden + 1
    opt.zero_grad()
    hidden.sum().backward()
    opt.step()
    print(step, "loss", hidden.sum().item())
!    print(step, "loss", hidden.sum().item())
""",
        "printed numbers",
        "gradients",
    ),
    "average_in_a_closure": pair(
        """
def averaging():
    average = 0.0
    def add(value):
        nonlocal average
        average = 0.5 * average + value
    return add
track = averaging()
net = nn.Linear(3, 2)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(4):
    hidden = net(torch.randn(4, 3)).sigmoid()
-    hidden += 1
+    hidden = hidden + 1
!    hidden = hidden + 1
    opt.zero_grad()
    hidden.sum().backward()
!    track(net.weight.norm().item())
    opt.step()
-    track(net.weight.norm().item())
+    track(net.weight.norm().item())
""",
        "track.average",
    ),
    "norms_of_a_class": pair(
        """
class Norms:
    seen = {}
net = nn.Linear(3, 2)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(4):
    hidden = net(torch.randn(4, 3)).sigmoid()
-    hidden += 1
+    hidden = hidden + 1
!    hidden = hidden + 1
    opt.zero_grad()
    hidden.sum().backward()
!    Norms.seen[step] = net.weight.norm().item()
    opt.step()
-    Norms.seen[step] = net.weight.norm().item()
+    Norms.seen[step] = net.weight.norm().item()
""",
        "Norms.seen[0]",
    ),
    "average_in_a_generator": pair(
        """
def averaging():
    average = torch.zeros(2, 3)
    while True:
        average = 0.5 * average + (yield)
track = averaging()
next(track)
net = nn.Linear(3, 2)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(4):
    hidden = net(torch.randn(4, 3)).sigmoid()
-    hidden += 1
+    hidden = hidden + 1
!    hidden = hidden + 1
    opt.zero_grad()
    hidden.sum().backward()
!    track.send(net.weight.detach())
    opt.step()
-    track.send(net.weight.detach())
+    track.send(net.weight.detach())
""",
        "track.average",
    ),
    "one_of_two_logs": pair(
        """
import os
os.makedirs("a", exist_ok=True), os.makedirs("b", exist_ok=True)
net = nn.Linear(3, 2)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(4):
    hidden = net(torch.randn(4, 3)).sigmoid()
-    hidden += 1
+    hidden = hidden + 1
!    hidden = hidden + 1
    print(step, file=open("a/log.txt", "a"))
    opt.zero_grad()
    hidden.sum().backward()
!    print(net.weight.norm().item(), file=open("b/log.txt", "a"))
    opt.step()
-    print(net.weight.norm().item(), file=open("b/log.txt", "a"))
+    print(net.weight.norm().item(), file=open("b/log.txt", "a"))
""",
        "b/log.txt",
        "gradients",
    ),
    "told_to_a_logger": pair(
        """
import logging
net = nn.Linear(3, 2)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(4):
    hidden = net(torch.randn(4, 3)).sigmoid()
-    hidden += 1
+    hidden = hidden + 1
!    hidden = hidden + 1
    opt.zero_grad()
    hidden.sum().backward()
!    logging.getLogger("fit").warning("norm %f", net.weight.norm())
    opt.step()
-    logging.getLogger("fit").warning("norm %f", net.weight.norm())
+    logging.getLogger("fit").warning("norm %f", net.weight.norm())
""",
        "logged numbers",
        "gradients",
    ),
    "array_saved": pair(
        """
import numpy as np
net = nn.Linear(3, 2)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(4):
    hidden = net(torch.randn(4, 3)).sigmoid()
-    hidden += 1
+    hidden = hidden + 1
!    hidden = hidden + 1
    opt.zero_grad()
    hidden.sum().backward()
!    np.save(f"norms{step}.npy", net.weight.detach().numpy())
    opt.step()
-    np.save(f"norms{step}.npy", net.weight.detach().numpy())
+    np.save(f"norms{step}.npy", net.weight.detach().numpy())
""",
        "norms0.npy",
        "gradients",
    ),
    "checkpoint_before_the_step": pair(
        """
net = nn.Linear(3, 2)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(4):
    hidden = net(torch.randn(4, 3)).sigmoid()
-    hidden += 1
+    hidden = hidden + 1
!    hidden = hidden + 1
    opt.zero_grad()
    hidden.sum().backward()
!    torch.save(net.state_dict(), "net.pt")
    opt.step()
-    torch.save(net.state_dict(), "net.pt")
+    torch.save(net.state_dict(), "net.pt")
""",
        "torch.save",
        "gradients",
    ),
    "another_loss_is_told": pair(
        """
net = nn.Linear(3, 2)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
losses = []
for step in range(4):
    hidden = net(torch.randn(4, 3)).sigmoid()
-    hidden += 1
+    hidden = hidden + 1
!    hidden = hidden + 2
    loss = hidden.sum()
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
        "loss",
        "gradients",
    ),
    "statistics_of_a_layer_twice": pair(
        """
net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(4):
    x = torch.randn(4, 3)
    hidden = net(x).sigmoid()
-    hidden += 1
+    hidden = hidden + 1
!    hidden = net(x).sigmoid() + 1
    loss = hidden.sum()
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
        "net.1.running_mean",
        "gradients",
    ),
    "state_of_a_recurrence_forgotten": pair(
        """
class Memory(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.Linear(3, 3)
        self.register_buffer("state", torch.zeros(3))

    def forward(self, x):
        read = self.cell(self.state.clone() + x)
        with torch.no_grad():
-            self.state.add_(read.mean(0))
+            self.state.add_(read.mean(0))
!            state = self.state.add(read.mean(0))
        return read

net = Memory()
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(4):
    hidden = net(torch.randn(4, 3)).sigmoid()
-    hidden += 1
+    hidden = hidden + 1
!    hidden = hidden + 1
    opt.zero_grad()
    hidden.sum().backward()
    opt.step()
""",
        "net.state",
    ),
}
