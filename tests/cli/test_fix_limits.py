"""Limits of ``gradsan fix``: steps, seconds, packages, and changes that it does not accept as a fix."""

import json
import time

import pytest

pytestmark = pytest.mark.long

LONG = """\
import torch
import time
net = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(100_000):
    out = net(torch.ones(1, 2)).exp()
    out *= 2
    optimizer.zero_grad()
    out.sum().backward()
    optimizer.step()
    if step == 3:
        print("step 3 was reached", flush=True)
        time.sleep(600)
"""


def test_a_run_ends_after_so_many_steps(tmp_path, run_warm_search):
    (tmp_path / "main.py").write_text(LONG)
    began = time.monotonic()
    done = run_warm_search("fix", "--steps", "2", "main.py")
    assert done.status == 0, done.stderr
    assert "ran 2 optimizer steps" in done.stderr
    assert time.monotonic() - began < 300


def test_a_run_ends_after_so_many_seconds(tmp_path, run_warm_search):
    (tmp_path / "main.py").write_text("import torch, time\ntime.sleep(600)\n")
    done = run_warm_search("fix", "--timeout", "5", "main.py")
    assert done.status == 1
    assert "did not end within 5 seconds" in done.stderr
    assert "nothing to mend" not in done.stderr


TRAINING = """\
import time
import torch
torch.manual_seed(0)
w = torch.ones(3, requires_grad=True)
optimizer = torch.optim.SGD([w], lr=0.01)
for step in range(1000):
    time.sleep(SECONDS)
    optimizer.zero_grad()
    h = w.exp()
    if step == 400:
        h += 1
    h.sum().backward()
    optimizer.step()
"""


def test_a_fault_of_a_later_step_is_found(tmp_path, run_warm_search):
    """As in a validation that comes after an epoch."""
    (tmp_path / "main.py").write_text(TRAINING.replace("SECONDS", "0"))
    done = run_warm_search("fix", "main.py")
    assert done.status == 0, done.stderr
    assert "GS101" in done.stderr
    assert "+        h = h + 1" in done.stderr


def test_a_run_that_was_ended_early_does_not_say_that_there_is_no_fault(tmp_path, run_warm_search):
    (tmp_path / "main.py").write_text(TRAINING.replace("SECONDS", "0.1"))
    done = run_warm_search("fix", "--timeout", "16", "main.py")
    assert done.status == 0, done.stderr
    assert "no fault was found in the first 20 optimizer steps" in done.stderr
    assert "--steps 0" in done.stderr


PACKAGE = """\
def scaled(x):
    x *= 2
    return x
"""
USER = """\
import torch
from borrowed.ops import scaled
w = torch.ones(3, requires_grad=True)
scaled(w.exp()).sum().backward()
"""


def test_an_installed_package_is_advised_on_and_changed_only_if_asked(tmp_path, run_warm_search):
    packages = tmp_path / "env" / "site-packages"
    (packages / "borrowed").mkdir(parents=True)
    (packages / "borrowed" / "__init__.py").touch()
    file = packages / "borrowed" / "ops.py"
    file.write_text(PACKAGE)
    (tmp_path / "main.py").write_text(USER)
    path = {"PYTHONPATH": str(packages)}

    advised = run_warm_search("fix", "main.py", env=path)
    assert "the write is in borrowed" in " ".join(advised.stderr.split())
    assert "+++ " not in advised.stderr or "ops.py" not in advised.stderr.split("+++ ")[1].splitlines()[0]
    assert file.read_text() == PACKAGE

    asked = run_warm_search("fix", "--include", "--apply", "main.py", env=path)
    assert asked.status == 0, asked.stderr
    assert file.read_text() == PACKAGE.replace("x *= 2", "x = x * 2")


ADDED_TO_A_LEAF = """\
import torch
torch.manual_seed(0)
net = torch.nn.Linear(2, 3)
x = torch.zeros(3, requires_grad=True)
x += net(torch.ones(2))
x.pow(2).sum().backward()
"""


def test_what_a_network_adds_to_a_leaf_stays_in_the_graph(tmp_path, run_warm_search):
    (tmp_path / "main.py").write_text(ADDED_TO_A_LEAF)
    done = run_warm_search("fix", "--json", "out.json", "main.py")
    assert done.status == 0, done.stderr
    fixes = json.loads((tmp_path / "out.json").read_text())["diagnoses"][0]["fixes"]
    # Under no_grad the program would run, and the network would learn nothing.
    assert "no_grad" not in {fix["kind"] for fix in fixes}
    assert fixes[0]["kind"] == "out_of_place"
    assert (fixes[0]["meaning"], fixes[0]["verification"]["status"]) == ("preserved", "passed")


TRAINER = """\
import torch
def fit(model, batches):
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in batches:
        loss = model.training_step(batch)
        opt.zero_grad()
        loss.backward()
        opt.step()
"""
TRAINED = """\
import torch
from trainer import fit
torch.manual_seed(0)
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.head = torch.nn.{kind}, torch.nn.Linear(4, 1)
        self.state = None
    def training_step(self, x):
        {step}
        return self.head(seen).pow(2).mean()
fit(Net(), torch.randn(4, 3, 5))
"""


@pytest.mark.parametrize(
    ("kind", "step", "changed"),
    [
        (
            "LSTM(5, 4)",
            "seen, self.state = self.cell(x, self.state)",
            "seen, self.state = self.cell(x, self.state)\n        self.state = tuple(s.detach() for s in self.state)",
        ),
        (
            "GRUCell(5, 4)",
            "if self.state is None:\n            self.state = torch.zeros(3, 4)\n"
            "        self.state = self.cell(x, self.state)\n        seen = self.state",
            "if self.state is None:\n            self.state = torch.zeros(3, 4)\n"
            "        self.state = self.cell(x, self.state.detach())\n        seen = self.state",
        ),
    ],
)
def test_a_state_is_detached_where_it_is_kept_if_a_package_runs_the_rounds(
    tmp_path, run_warm_search, kind, step, changed
):
    packages = tmp_path / "env" / "site-packages"
    packages.mkdir(parents=True)
    (packages / "trainer.py").write_text(TRAINER)
    (tmp_path / "main.py").write_text(TRAINED.format(kind=kind, step=step))
    done = run_warm_search("fix", "--apply", "--yes", "main.py", env={"PYTHONPATH": str(packages)})
    assert done.status == 0, done.stderr
    assert (tmp_path / "main.py").read_text() == TRAINED.format(kind=kind, step=changed)
