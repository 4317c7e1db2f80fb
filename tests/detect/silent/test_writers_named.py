"""Labels of silent findings: the statement that wrote is named, wherever in the program it stands."""

from __future__ import annotations

import re
import runpy
import threading
from pathlib import Path

import pytest

import gradsan
from cases import each
from gradsan.record.recorder import recorder

PROGRAMS = {
    "array_written_by_another_method": """
import numpy as np
import torch
class Prototypes:
    def __init__(self):
        self.table = np.eye(4, dtype=np.float32)
    def scores(self, z):
        return z @ torch.from_numpy(self.table)
    def move(self, towards):
        np.copyto(self.table, 0.9 * self.table + 0.1 * towards)  # written
        self.table[0] = 0.0  # written
net = torch.nn.Linear(3, 4)
opt = torch.optim.SGD(net.parameters(), 0.1)
prototypes = Prototypes()
for _ in range(3):
    loss = prototypes.scores(net(torch.randn(5, 3))).logsumexp(1).mean()
    prototypes.move(np.ones((4, 4), np.float32))
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
    "weights_of_the_server_without_a_copy": """
import torch
net = torch.nn.Linear(3, 2)
def local(steps):
    opt = torch.optim.Adam(net.parameters(), 0.1)
    before = [w.detach() for w in net.parameters()]
    for _ in range(steps):
        opt.zero_grad()
        near = sum((w - b).pow(2).sum() for w, b in zip(net.parameters(), before))
        (net(torch.randn(4, 3)).pow(2).mean() + near).backward()
        opt.step()  # written
for _ in range(3):
    local(3)
""",
    "number_told_to_require_a_gradient": """
import torch
net = torch.nn.Linear(3, 2)
opt = torch.optim.Adam(net.parameters(), 0.1)
def objective(x):
    return 1 - (net(x).argmax(1) == 0).float().mean()
for _ in range(3):
    miss = objective(torch.randn(8, 3))
    miss.requires_grad_(True)  # written
    opt.zero_grad()
    miss.backward()
    opt.step()
""",
    "array_written_by_two_methods": """
import numpy as np
import torch
class Prototypes:
    def __init__(self):
        self.table = np.eye(4, dtype=np.float32)
    def scores(self, z):
        return z @ torch.from_numpy(self.table)  # written
    def reset(self):
        self.table[0] = 0.0  # suspect
    def move(self, towards):
        np.copyto(self.table, 0.9 * self.table + 0.1 * towards)  # suspect
net = torch.nn.Linear(3, 4)
opt = torch.optim.SGD(net.parameters(), 0.1)
prototypes = Prototypes()
for _ in range(3):
    loss = prototypes.scores(net(torch.randn(5, 3))).logsumexp(1).mean()
    prototypes.move(np.ones((4, 4), np.float32))
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
    "array_given_to_a_function_that_writes_it": """
import numpy as np
import torch
def spread(values, floor):
    low = values.min()
    values -= low  # written
    np.maximum(values, floor, out=values)  # written
    return values.mean()
def show(values):
    copy = values.copy()
    copy /= 2
    return copy
layer = torch.nn.Linear(4, 3)
for _ in range(2):
    hidden = torch.sigmoid(layer(torch.randn(6, 4)))
    loss = hidden.mean()
    show(hidden.detach().numpy())
    spread(hidden.detach().numpy(), 0.1)
    loss.backward()
""",
    "array_of_a_staging_buffer_filled_again": """
import numpy as np
import torch
layer, host = torch.nn.Linear(4, 3), np.zeros((5, 4), np.float32)
host[:] = np.random.randn(5, 4)
rows = torch.from_numpy(host)
host += 1
loss = layer(rows).square().mean()
host[:] = np.random.randn(5, 4)  # written
loss.backward()
""",
    "array_written_in_a_branch": """
import numpy as np
import torch
layer = torch.nn.Linear(4, 3)
rows = torch.randn(5, 4)
loss = layer(rows).square().mean()
shown = rows.numpy()  # written
if shown.max() > 0:
    shown /= shown.max()  # suspect
loss.backward()
""",
    "two_parameters_tied_by_their_data": """
import torch
class Words(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(6, 4)
        self.scores = torch.nn.Linear(4, 6, bias=False)
        self.scores.weight.data = self.table.weight.data  # created
words = Words()
opt = torch.optim.Adam(words.parameters(), 0.1)
for _ in range(2):
    opt.zero_grad()
    words.scores(words.table(torch.arange(6))).logsumexp(1).mean().backward()
    opt.step()
""",
    "slice_of_a_ring_that_is_filled_on": """
import numpy as np
import torch
class Ring:
    def __init__(self):
        self.rows, self.at = np.zeros((6, 3), np.float32), 0
    def add(self, rows):
        self.rows[self.at:self.at + 2] = rows  # written
        self.at = (self.at + 2) % 6
    def recent(self):
        return torch.from_numpy(self.rows[self.at:self.at + 2])
ring, layer = Ring(), torch.nn.Linear(3, 1)
for _ in range(3):
    seen = ring.recent()
    loss = layer(seen).square().mean()
    ring.add(np.random.randn(2, 3))
    loss.backward()
""",
    "state_of_a_world_that_goes_on": """
import numpy as np
import torch
class World:
    def __init__(self, size):
        self.view = np.zeros(size, np.float32)
    def begin(self):
        self.view[:] = np.random.randn(len(self.view))
        return self.view
    def act(self, choice):
        self.view[choice] += 1  # written
        np.multiply(self.view, 0.9, out=self.view)  # written
        return self.view, -abs(float(self.view.sum()))
policy = torch.nn.Linear(3, 3)
world = World(3)
for _ in range(2):
    seen, total = world.begin(), 0.0
    for _ in range(3):
        scores = policy(torch.as_tensor(seen)).log_softmax(0)
        seen, gain = world.act(int(scores.argmax()))
        total = total - scores.max() * gain
    total.backward()
""",
}


@pytest.mark.parametrize("mode", ["watch", "deep"])
@each("name", PROGRAMS)
def test_the_statement_that_wrote_is_named(name: str, mode: str, tmp_path: Path) -> None:
    body = PROGRAMS[name]
    (file := tmp_path / f"{name}.py").write_text(body, encoding="utf-8")
    expected = {(at, role[1]) for at, line in enumerate(body.splitlines(), 1) if (role := re.search(r"# (\w+)$", line))}
    recorder().core.clear()
    watch = gradsan.watch(mode)
    thread = threading.Thread(target=watch(runpy.run_path), args=(str(file),))
    thread.start()
    thread.join()
    (found,) = [one for one in watch.diagnoses if one.severity != "note"]
    wanted = {role for _, role in expected}
    told = {(label.frame.line, label.role) for label in found.labels if label.role in wanted}
    assert told == expected
