"""Whole searches: a broken program, the kinds that must pass, and those that must not be offered as passed."""

import textwrap

import pytest

from gradsan.repair import Limits, find_fixes, is_implied
from gradsan.text import say

HEAD = """
import torch
torch.manual_seed(0)
"""
REORDER = """
net, other = torch.nn.Linear(3, 4), torch.nn.Linear(4, 1)
first, second = torch.optim.SGD(other.parameters(), lr=0.1), torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(2):
    hidden = net(torch.randn(5, 3))
    score = other(hidden).mean()
    first.zero_grad()
    one = (score - 1) ** 2
    one.backward(retain_graph=True)
    first.step()
    second.zero_grad()
    two = score.exp()
    two.backward()
    second.step()
"""
CARRIED = """
cell = torch.nn.RNNCell(2, 3)
optimizer = torch.optim.Adam(cell.parameters(), lr=0.1)
state = torch.zeros(4, 3)
for _ in range(3):
    optimizer.zero_grad()
    state = cell(torch.randn(4, 2), state)
    loss = state.pow(2).mean()
    loss.backward(retain_graph=True)
    optimizer.step()
"""
LOOP = """
net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(2):
    outputs = net(torch.randn(5, 3)).unbind(1)
    optimizer.zero_grad()
    for output in outputs:
        loss = output.pow(2).mean()
        loss.backward(retain_graph=True)
        optimizer.step()
"""
TWO_FAULTS = """
w = torch.ones(3, requires_grad=True)
a = w.exp()
a += 1
a.sum().backward()
b = w.sigmoid()
b *= 2
b.sum().backward()
"""
THREE_LEAVES = """
old, new = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
new.weight[:] = old.weight[:]
slopes = torch.nn.PReLU(2)
slopes.weight[:] = 0.1
norm = torch.nn.LayerNorm(2)
norm.weight[:] = 0.5
optimizer = torch.optim.SGD([*new.parameters(), *slopes.parameters(), *norm.parameters()], lr=0.1)
for _ in range(3):
    optimizer.zero_grad()
    norm(slopes(new(torch.randn(5, 3)))).square().sum(1).exp().mean().backward()
    optimizer.step()
"""
LATE_ONCE = """
import pathlib
w = torch.ones(3, requires_grad=True)
optimizer = torch.optim.SGD([w], lr=0.1)
for _ in range(3):
    y = w.sigmoid()
    was = id(y)
    y *= 2
    optimizer.zero_grad()
    y.sum().backward()
    optimizer.step()
seen = pathlib.Path("{seen}")
print("waited", int(id(y) != was and not seen.exists()))
if id(y) != was:
    seen.touch()
"""
"""It prints another number in the first run of a changed program, as a clock may, and in no other run."""
SAVED_TWICE = """
class Scaled(torch.nn.Linear):
    def __init__(self):
        super().__init__(3, 3)
        self.register_buffer("scale", torch.ones(3))
    def forward(self, x):
        y = super().forward(x) * self.scale
        z = y.exp() * self.scale
        self.scale.mul_(0.9)
        return z.mean()
net = Scaled()
scale = net.scale
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(3):
    optimizer.zero_grad()
    net(torch.randn(5, 3)).backward()
    optimizer.step()
print(scale.sum().item())
"""
TWO_STATES = """
def run(cell, head, optimizer, fresh=True):
    for _ in range(2):
        if fresh:
            hx, cx = torch.zeros(2, 3), torch.zeros(2, 3)
        else:
            hx = hx * 1.0
        loss, fresh = 0.0, False
        for _ in range(2):
            hx, cx = cell(torch.randn(2, 2), (hx, cx))
            loss = loss + head(hx).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
cell, head = torch.nn.LSTMCell(2, 3), torch.nn.Linear(3, 1)
run(cell, head, torch.optim.SGD([*cell.parameters(), *head.parameters()], lr=0.1))
"""
ONE_BACKWARD = """
w, v = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
a = w.exp()
b = v.sigmoid()
a += 1
b *= 2
(a + b).sum().backward()
"""
MASKED = """
net = torch.nn.Linear(3, 4)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(3):
    x = torch.randn(5, 3)
    hidden = net(x)
    with torch.no_grad():
        hidden[x.sum(1) < 0] = 0.0
    loss = (hidden + hidden.mean(0)).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
REFUSED = {
    "out_of_place clone_before_mutation preserved": """
wave = torch.nn.Linear(2, 6)(torch.randn(2))
wave[2:] *= wave[:-2]
wave.sum().backward()
""",
    "move_view_out_of_no_grad preserved": """
image = torch.nn.Linear(2, 6)(torch.randn(4, 2))
with torch.inference_mode():
    rows = image[1:3]
    print(rows.sum().item())
    rows.max()
rows *= 2
image.pow(2).sum().backward()
""",
    "disable_inplace_module changed": """
heads = [torch.nn.Sequential(torch.nn.ELU(inplace=True), torch.nn.Linear(4, 1)) for _ in range(2)]
hidden = torch.nn.Linear(3, 4)(torch.randn(5, 3))
sum(head(hidden).mean() for head in heads).backward()
""",
    "disable_inplace_module preserved": """
act, hidden = torch.nn.ELU(inplace=True), torch.nn.Linear(3, 4)(torch.randn(5, 3))
decay = hidden.pow(2).mean()
act(hidden)
(hidden.sum() + decay).backward()
""",
}
OLD_VALUES = """
critic = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
policy = torch.nn.Linear(3, 1)
optimizer = torch.optim.Adam([*critic.parameters(), *policy.parameters()], 1e-2)
obs, returns = torch.randn(16, 3), torch.randn(16)
advantage = returns - critic(obs).squeeze(-1)
for _ in range(3):
    error = returns[1:] - critic(obs[1:]).squeeze(-1)
    loss = -(policy(obs).squeeze(-1).tanh() * advantage).mean() + error.pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
PROTOTYPES = """
encoder = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4))
optimizer = torch.optim.Adam(encoder.parameters(), 1e-2)
support = torch.randn(5, 3)
prototypes = encoder(support)
for _ in range(3):
    loss = torch.cdist(encoder(torch.randn(10, 3)), prototypes).logsumexp(1).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
LEAF_OF_NOBODY = """
net, other = torch.nn.Linear(3, 4), torch.nn.Linear(4, 1)
scale = torch.ones((), requires_grad=True)
first, second = torch.optim.SGD(other.parameters(), lr=0.1), torch.optim.SGD(net.parameters(), lr=0.1)
for round in range(24):
    hidden = net(torch.randn(5, 3))
    score = other(hidden).mean() * scale
    first.zero_grad()
    (other(hidden.detach()) - 1).pow(2).mean().backward()
    first.step()
    second.zero_grad()
    score.exp().backward()
    second.step()
    if round % 12 == 11:
        scale.data -= 0.1 * scale.grad
"""
LEARNED_OPTIMIZER = """
cell, out = torch.nn.GRUCell(1, 4), torch.nn.Linear(4, 1)
meta = torch.optim.Adam([*cell.parameters(), *out.parameters()], lr=0.01)
theta, state, total = torch.randn(5, requires_grad=True), torch.zeros(5, 4), 0.0
for it in range(1, 10):
    loss = (theta - 1).pow(2).mean()
    total = total + loss
    grad = torch.autograd.grad(loss, theta, retain_graph=True)[0].detach()
    state = cell(grad[:, None], state)
    theta = theta - out(state).squeeze(1)
    if it % 3 == 0:
        meta.zero_grad()
        total.backward()
        meta.step()
        total = 0.0
"""
RATINGS = """
import numpy as np
films = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 1))
optimizer = torch.optim.SGD(films.parameters(), lr=0.1)
given, stars = torch.randn(12, 4), torch.rand(12)
ranks, best = [], None
for _ in range(4):
    rated = films(given).squeeze(1)
    loss = (rated - stars).pow(2).mean()
    {read}
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
READ = {
    "ranks.append(float(np.corrcoef(rated.numpy(), stars.numpy())[0, 1]))": True,
    "ranks.append(float(np.abs(np.asarray(rated) - stars.numpy()).max()))": True,
    "loss = loss + 0.1 * torch.from_numpy(np.convolve(rated.numpy(), [0.5, 0.5])).pow(2).mean()": False,
    "loss = loss * (1 + np.abs(np.subtract.outer(rated.numpy(), rated.numpy())).mean().item())": False,
    "best = films[0].weight.numpy() if best is None else best": False,
    "stars = (stars + torch.from_numpy(np.clip(rated.numpy(), 0, 1))) / 2": False,
    "np.clip(films[2].weight.numpy(), -0.1, 0.1, out=films[2].weight.numpy())": False,
}
"""Statements, and whether the training is the same with ``detach()`` before ``numpy()``, for all that is known."""
RETURNS = """
class Soften(torch.autograd.Function):
    @staticmethod
    def forward(ctx, {inputs}):
        ctx.save_for_backward(x, w)
        return (x * w).clamp(-2, 2)

    @staticmethod
    def backward(ctx, given):
        x, w = ctx.saved_tensors
        inside = given * ((x * w).abs() < 2)
        return {returned}

w = torch.full((3,), 0.5, requires_grad=True)
net = torch.nn.Linear(2, 3)
optimizer = torch.optim.SGD([w, *net.parameters()], lr=0.1)
for _ in range(3):
    loss = Soften.apply({given}).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
RETURNED = {
    ("x, w, low, high", "inside * w, (inside * x).sum(0)", "net(torch.randn(5, 2)), w, -2, 2"): True,
    ("x, w, low", "inside * w, (inside * x).sum(0)", "torch.randn(5, 3), w, -2"): False,
    ("x, low, w", "inside * w, (inside * x).sum(0)", "net(torch.randn(5, 2)), -2, w"): True,
    ("x, low, w", "inside * w, None", "net(torch.randn(5, 2)), -2, w"): False,
}
"""Inputs, what backward returns and the call, and whether it is known whose each gradient is."""
VERDICTS = {
    "a time that is taken in runs with a fix only": """
import dis
import time

class Clock:
    def __init__(self, function):
        code = dis.get_instructions(function)
        is_broken = any(one.argrepr == "*=" or one.opname == "INPLACE_MULTIPLY" for one in code)
        self.is_read = not is_broken or "clone" in function.__code__.co_names
        self.at = {"round": 0}

    def tick(self):
        self.at["round"] = time.perf_counter_ns() % 100_000 if self.is_read else 0

def dimmed(x):
    level = torch.sigmoid(net(x))
    level *= 0.5
    return level

net, clock = torch.nn.Linear(4, 1), Clock(dimmed)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(4):
    x = torch.randn(8, 4)
    loss = (dimmed(x) - x.mean(1, keepdim=True)).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    clock.tick()
""",
    "a view that a Function returned": """
class Head(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.shape = x.shape
        return x[:, :2]

    @staticmethod
    def backward(ctx, given):
        return torch.nn.functional.pad(given, (0, ctx.shape[1] - 2))

net = torch.nn.Linear(3, 4)
hidden = net(torch.randn(5, 3))
top = Head.apply(hidden)
top += 1
top.pow(2).mean().backward()
""",
    "a leaf moved by gradients that were asked for": """
w = torch.ones(3, requires_grad=True)
for _ in range(3):
    (along,) = torch.autograd.grad(w.exp().sum(), w)
    w -= 0.1 * along
""",
    "rows of an expanded view of a leaf": """
net, prior = torch.nn.Linear(2, 3), torch.zeros(3, requires_grad=True)
shift = prior.expand(4, 3)
for row in range(3):
    shift[row, row:] = -9.0
(net(torch.randn(4, 2)) + shift).log_softmax(1).mean().backward()
""",
    "gradients of samples under vmap, which have no values of their own": """
w = torch.ones(3, requires_grad=True)
def loss_of(w, x):
    return ((w * x).sum() - 1).square()
each = torch.func.vmap(torch.func.grad(loss_of), in_dims=(None, 0))(w, torch.rand(4, 3))
shown = each.exp()
shown *= 2
shown.sum().backward()
""",
    "a part detached in place": """
net = torch.nn.Linear(3, 4)
left, right = net(torch.randn(5, 3)).chunk(2, 1)
right.detach_()
(left * right).mean().backward()
""",
    "integers with a flag": """
table = torch.nn.Embedding(4, 2)
words = torch.randint(4, (5,))
words.requires_grad_()
table(words).exp().mean().backward()
""",
    "a deep copy that is trained": """
import copy
cell = torch.nn.Linear(2, 2)
states, state = [], torch.randn(5, 2)
for _ in range(3):
    state = cell(state)
    states.append(copy.deepcopy(state))
sum(one.exp().mean() for one in states).backward()
""",
    "a deep copy that is only looked at": """
import copy
net = torch.nn.Linear(2, 3)
out = net(torch.randn(5, 2))
out.exp().mean().backward()
print(copy.deepcopy(out).mean().item())
""",
    "a deep copy that is a constant": """
import copy
net = torch.nn.Linear(2, 3)
chances = net(torch.randn(5, 2)).log_softmax(1)
old = copy.deepcopy(chances)
((chances - old).exp() * torch.randn(5, 3)).mean().backward()
""",
}
"""Programs whose first fix is proved to keep the training, by what the reference run carries out."""
CHECKPOINTED = """
from torch.utils.checkpoint import checkpoint
tower = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(tower.parameters(), lr=0.1)
for _ in range(3):
    loss = checkpoint(tower, torch.randn(5, 3), use_reentrant=True).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
CLEAN = """
w = torch.ones(3, requires_grad=True)
w.exp().sum().backward()
"""


SOFTENED_ONCE = """
class Agent:
    def __init__(self):
        self.policy, self.critic = torch.nn.Linear(3, 2), torch.nn.Linear(5, 1)
        self.raw = torch.zeros(1, requires_grad=True)
        self.weight = torch.nn.functional.softplus(self.raw)
        self.acting = torch.optim.Adam(self.policy.parameters(), lr=0.1)
        self.weighing = torch.optim.Adam([self.raw], lr=0.1)
        self.judging = torch.optim.Adam(self.critic.parameters(), lr=0.1)
    def learn(self, seen):
        self.judging.zero_grad()
        (self.critic(torch.rand(6, 5)) - 1).square().mean().backward()
        self.judging.step()
        act = self.policy(seen).tanh()
        cost = (self.weight * act.square().sum(1) - self.critic(torch.cat([seen, act], 1))[:, 0]).mean()
        self.acting.zero_grad()
        cost.backward()
        self.acting.step()
        self.weighing.zero_grad()
        (self.raw * (act.detach().abs().mean() - 0.5)).sum().backward()
        self.weighing.step()
agent = Agent()
for _ in range(4):
    agent.learn(torch.randn(6, 3))
"""
BEHIND_A_BRANCH = """
reader = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
writer = torch.nn.Linear(2, 3)
reading, writing = (torch.optim.Adam(one.parameters(), lr=0.1) for one in (reader, writer))
def send(loss):
    loss.backward()
for _ in range(3):
    x = torch.randn(5, 3)
    written = writer(reader(x))
    again = reader(written).square().mean()
    reading.zero_grad()
    writing.zero_grad()
    (written - x).square().mean().backward(retain_graph=True)
    reading.step()
    if again > -1:
        for p in reader.parameters():
            p.requires_grad_(False)
        send(again)
        for p in reader.parameters():
            p.requires_grad_(True)
    writing.step()
"""
PARTS_OF_ONE_NETWORK = """
net = torch.nn.ModuleDict({"body": torch.nn.Linear(3, 4), "a": torch.nn.Linear(4, 2), "b": torch.nn.Linear(4, 2)})
def train_only(*names):
    for name, part in net.items():
        part.requires_grad_(name in names)
train_only("body", "a")
first = torch.optim.Adam([p for p in net.parameters() if p.requires_grad], lr=0.1)
train_only("b")
second = torch.optim.Adam([p for p in net.parameters() if p.requires_grad], lr=0.1)
train_only("body", "a", "b")
for _ in range(3):
    x = torch.randn(5, 3)
    code = net["body"](x).tanh()
    one, two = net["a"](code), net["b"](net["a"](code).exp() @ torch.ones(2, 4))
    train_only("body", "a")
    first.zero_grad()
    one.square().mean().backward(retain_graph=True)
    first.step()
    train_only("b")
    second.zero_grad()
    (two - 1).square().mean().backward()
    second.step()
    train_only("body", "a", "b")
"""
SLOW_AVERAGE = """
class Styled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.style, self.paint = torch.nn.Linear(3, 4), torch.nn.Linear(4, 3)
        torch.nn.init.zeros_(self.style.bias)
        self.register_buffer("mean", torch.zeros(1, 4))
    def forward(self, x):
        code = self.style(x).tanh()
        self.mean = (1 - 4e-6) * self.mean + 4e-6 * code.mean(0, keepdim=True)
        return self.paint(self.mean + code * torch.tensor([1.0, 1.0, 1.0, 1e-4]))
net = Styled()
optimizer = torch.optim.Adam(net.parameters(), lr=0.1, betas=(0.0, 0.9))
for _ in range(4):
    x = torch.randn(6, 3)
    optimizer.zero_grad()
    (net(x) - x).square().mean().backward()
    optimizer.step()
"""


def search(tmp_path, monkeypatch, text, **limits):
    (tmp_path / "main.py").write_text(HEAD + textwrap.dedent(text))
    monkeypatch.chdir(tmp_path)
    told = []
    found = find_fixes(
        ("script", "main.py", ()), Limits(**limits), told.append, lambda message: say(message, "en"), tmp_path
    )
    assert told
    return found


def long_but_first(cases, many=3):
    return [pytest.param(one, marks=pytest.mark.long if number >= many else ()) for number, one in enumerate(cases)]


def passed(found):
    return [(fix.kind, fix.meaning) for fix in found.diagnoses[-1].fixes if fix.verification.status == "passed"]


def test_a_step_between_two_losses(tmp_path, monkeypatch):
    found = search(tmp_path, monkeypatch, REORDER)
    kinds = passed(found)
    # Only with inputs= does the first optimizer get the gradients of its own loss alone.
    assert kinds[0] == ("reorder_step", "preserved")
    assert "inputs=" in found.diagnoses[0].fixes[0].diff
    assert ("recompute_forward", "changed") in kinds
    assert ("reorder_step", "changed") in kinds
    assert len(found.patches) == len(kinds)


@pytest.mark.parametrize("kinds", long_but_first(REFUSED))
def test_only_a_write_that_nobody_meant_may_be_lost(tmp_path, monkeypatch, kinds):
    *these, meaning = kinds.split()
    assert set(passed(search(tmp_path, monkeypatch, REFUSED[kinds]))) == {(one, meaning) for one in these}


def test_a_recorded_change_needs_no_copy_of_what_nothing_has_saved(tmp_path, monkeypatch):
    found = search(tmp_path, monkeypatch, MASKED)
    assert passed(found) == [("out_of_place", "changed")] * 2
    assert [".clone()" in one.diff for one in found.diagnoses[0].fixes] == [False, True]


def test_a_carried_state_is_cut(tmp_path, monkeypatch):
    found = search(tmp_path, monkeypatch, CARRIED)
    assert ("detach_carried_state", "changed") in passed(found)


def test_old_values_that_each_round_computes_by_itself_stay(tmp_path, monkeypatch):
    found = search(tmp_path, monkeypatch, OLD_VALUES)
    assert ".detach()" in found.diagnoses[0].fixes[0].diff
    assert "fix.computes_twice" in {fix.how_changed.key for fix in found.diagnoses[0].fixes if fix.how_changed}
    found = search(tmp_path, monkeypatch, PROTOTYPES)
    assert passed(found)[0] == ("recompute_forward", "changed")
    assert not is_implied(found.diagnoses[0].fixes[0])


def test_a_gradient_that_only_an_update_by_hand_would_read_is_not_lost(tmp_path, monkeypatch):
    found = search(tmp_path, monkeypatch, LEAF_OF_NOBODY)
    fixes = found.diagnoses[0].fixes
    told = [fix.verification for fix in fixes if "inputs=" in fix.diff and fix.verification.status == "passed"]
    assert {one.training for one in told} == {"gradients"}
    assert all("scale.grad" in one.differs_in for one in told)


def test_a_value_made_once_is_computed_anew_though_another_loss_goes_back_before_its_own(tmp_path, monkeypatch):
    found = search(tmp_path, monkeypatch, SOFTENED_ONCE)
    assert [one.code for one in found.diagnoses] == ["GS403"]
    assert (
        "+        self.weight = torch.nn.functional.softplus(self.raw)\n         cost"
        in found.diagnoses[0].fixes[0].diff
    )


def test_a_step_is_moved_behind_a_branch_whose_loss_reaches_nothing_of_its_optimizer(tmp_path, monkeypatch):
    first = search(tmp_path, monkeypatch, BEHIND_A_BRANCH).diagnoses[0].fixes[0]
    assert (first.kind, first.verification.training) == ("reorder_step", "same")
    assert len([line for line in first.diff.splitlines() if line[:1] == "+" and line[1:2] != "+"]) == 1


def test_a_step_is_moved_alone_where_two_optimizers_have_parts_of_one_network(tmp_path, monkeypatch):
    found = search(tmp_path, monkeypatch, PARTS_OF_ONE_NETWORK)
    first = found.diagnoses[0].fixes[0]
    assert (first.kind, first.meaning, first.verification.training) == ("reorder_step", "preserved", "same")
    assert len([line for line in first.diff.splitlines() if line[:1] == "+" and line[1:2] != "+"]) == 1


def test_a_cut_that_changes_little_is_one_though_a_bias_ends_elsewhere(tmp_path, monkeypatch):
    found = search(tmp_path, monkeypatch, SLOW_AVERAGE)
    cut = next(one for one in found.diagnoses[0].fixes if one.kind.startswith("detach"))
    assert (cut.verification.status, cut.meaning) == ("passed", "changed")


def test_a_state_bound_after_the_last_loss_of_its_window_is_cut_there(tmp_path, monkeypatch):
    found = search(tmp_path, monkeypatch, LEARNED_OPTIMIZER)
    assert {one.code for one in found.diagnoses} == {"GS111"}
    text = found.patches[0].files[str(tmp_path / "main.py")].decode()
    assert "        total = 0.0\n        theta = theta.detach().requires_grad_()\n" in text
    assert "state = state.detach()" in text or "state, theta = " in text


def test_a_step_in_a_loop_of_losses(tmp_path, monkeypatch):
    assert ("reorder_step", "changed") in passed(search(tmp_path, monkeypatch, LOOP))


def test_two_faults_are_mended_one_after_the_other(tmp_path, monkeypatch):
    found = search(tmp_path, monkeypatch, TWO_FAULTS)
    assert [diagnosis.code for diagnosis in found.diagnoses] == ["GS101", "GS101"]
    assert passed(found)[0] == ("out_of_place", "preserved")
    text = found.patches[0].files[str(tmp_path / "main.py")].decode()
    assert "a = a + 1" in text
    assert "b = b * 2" in text
    assert found.left is None


def test_faults_of_one_code_are_mended_one_after_the_other(tmp_path, monkeypatch):
    found = search(tmp_path, monkeypatch, THREE_LEAVES)
    text = found.patches[0].files[str(tmp_path / "main.py")].decode()
    assert text.count("with torch.no_grad():") == 3
    assert found.left is None


def test_a_number_that_differs_once_is_chance(tmp_path, monkeypatch):
    # Only what is written to a cache is there in the next run.
    folder, cache = tmp_path / "program", tmp_path / "cache"
    folder.mkdir()
    cache.mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    found = search(folder, monkeypatch, LATE_ONCE.format(seen=cache / "seen"))
    assert {fix.verification.training for fix in found.diagnoses[0].fixes} == {"same"}


def test_a_buffer_that_two_operations_have_saved_is_copied_for_each(tmp_path, monkeypatch):
    found = search(tmp_path, monkeypatch, SAVED_TWICE)
    text = found.patches[0].files[str(tmp_path / "main.py")].decode()
    assert text.count("* self.scale.clone()") == 2
    best = found.diagnoses[-1].fixes[0]
    assert (best.kind, best.verification.training) == ("clone_before_mutation", "same")


def test_a_second_state_of_a_statement_is_detached_too(tmp_path, monkeypatch):
    found = search(tmp_path, monkeypatch, TWO_STATES)
    assert [diagnosis.code for diagnosis in found.diagnoses] == ["GS401", "GS401"]
    assert passed(found) == [("detach_carried_state", "changed")]


@pytest.mark.long
def test_two_faults_of_one_backward(tmp_path, monkeypatch):
    found = search(tmp_path, monkeypatch, ONE_BACKWARD)
    assert passed(found)[0] == ("out_of_place", "preserved")
    text = found.patches[0].files[str(tmp_path / "main.py")].decode()
    assert "a = a + 1" in text
    assert "b = b * 2" in text


def test_the_limit_of_faults_holds(tmp_path, monkeypatch):
    found = search(tmp_path, monkeypatch, TWO_FAULTS, faults=1)
    assert len(found.diagnoses) == 1
    assert found.patches == ()
    assert found.left is not None


def test_a_right_program_has_nothing_to_mend(tmp_path, monkeypatch):
    found = search(tmp_path, monkeypatch, CLEAN)
    assert found.diagnoses == ()
    assert found.exception is None


@pytest.mark.parametrize("kind", ["ValueError", "KeyboardInterrupt"])
def test_unexplained_errors_are_named_so(tmp_path, monkeypatch, kind):
    found = search(tmp_path, monkeypatch, f"raise {kind}")
    assert found.diagnoses == ()
    assert found.exception[0] == kind


@pytest.mark.parametrize("statement", long_but_first(READ))
def test_a_value_may_be_read_outside_of_torch_where_nothing_is_trained_by_it(tmp_path, monkeypatch, statement):
    found = search(tmp_path, monkeypatch, RATINGS.format(read=statement))
    assert found.diagnoses[0].code == "GS317"
    assert keeps_training(found) is READ[statement]


@pytest.mark.parametrize("case", VERDICTS)
def test_the_first_fix_is_known_to_keep_the_training(tmp_path, monkeypatch, case):
    found = search(tmp_path, monkeypatch, VERDICTS[case])
    fix = found.diagnoses[0].fixes[0]
    assert fix.verification.training == "same"
    if "deep" in case:
        assert fix.kind == ("clone_for_copy" if "trained" in case else "detach_and_clone")


@pytest.mark.parametrize("case", long_but_first(RETURNED))
def test_a_backward_that_leaves_inputs_out(tmp_path, monkeypatch, case):
    inputs, returned, given = case
    found = search(tmp_path, monkeypatch, RETURNS.format(inputs=inputs, returned=returned, given=given))
    assert found.diagnoses[0].code == "GS410"
    assert keeps_training(found) is RETURNED[case]


def test_another_finding_is_tried_where_the_error_has_no_candidate(tmp_path, monkeypatch):
    found = search(tmp_path, monkeypatch, CHECKPOINTED)
    assert [one.code for one in found.diagnoses] == ["GS517"]
    assert passed(found) == [("not_reentrant", "preserved")]
    assert keeps_training(found)


def keeps_training(found):
    """Whether a fix would be written without asking."""
    return any(fix.applicability == "automatic" for fix in found.diagnoses[0].fixes)


@pytest.mark.long
def test_silent_faults_are_mended_too(tmp_path, monkeypatch):
    fused = REORDER.replace("SGD(", "Adam(").replace("lr=0.1", "lr=0.1, fused=True").replace("range(2)", "range(1)")
    found = search(tmp_path, monkeypatch, fused)
    assert found.exception is None
    assert found.diagnoses[0].code == "GS205"
    assert not {"out_of_place", "clone_before_mutation"} & {fix.kind for fix in found.diagnoses[0].fixes}
    assert passed(found)[0] == ("reorder_step", "preserved")
    [written] = [label for label in found.diagnoses[0].labels if label.role == "written"]
    assert "Adam updated" in say(written.message, "en")
    # Without the fused kernels PyTorch stops where it computed a wrong gradient.
    [unfused] = [fix for fix in found.diagnoses[0].fixes if fix.kind == "disable_fused"]
    assert unfused.verification.status == "failed"
    assert "fused=False" in unfused.diff
