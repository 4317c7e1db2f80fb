"""Loops of Accelerate, which needs no module of gradsan's own: ``gradsan.watch()`` around it, or ``gradsan run``."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import gradsan
from forked import warm_python

accelerate = pytest.importorskip("accelerate")

ROUNDS = 4
LAUNCHED = """
import torch
from accelerate import Accelerator

accelerator = Accelerator(cpu=True)
net, optimizer = accelerator.prepare(net := torch.nn.Linear(4, 1), torch.optim.SGD(net.parameters(), 0.1))
for _ in range(2):
    optimizer.zero_grad()
    curve = net(torch.ones(2, 4)).exp()
    curve.data.mul_(2)
    accelerator.backward(curve.sum())
    optimizer.step()
print("processes:", accelerator.num_processes)
"""


@pytest.fixture(autouse=True)
def forget_state():
    """Accelerate keeps precision and accumulation in a state of the process; a test may forget it once more."""

    def forget():
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        accelerate.state.GradientState._reset_state()

    forget()
    return forget


def train(spoil="nothing", **settings):
    """A net trained for four batches; its losses, its parameters, and how many steps counted."""
    accelerator = accelerate.Accelerator(cpu=True, **settings)
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    data = DataLoader(TensorDataset(torch.randn(4 * ROUNDS, 4)), 4)
    net, optimizer, batches = accelerator.prepare(module, torch.optim.Adam(module.parameters(), 0.05), data)
    losses = []
    for number, (batch,) in enumerate(batches):
        with accelerator.accumulate(net):
            hidden = net[:2](batch) if spoil == "in place" else None
            loss = net(batch).float().square().mean()
            if spoil == "step too early" and number == 1:
                with torch.no_grad():
                    net[2].weight.mul_(0.5)
            if hidden is not None:
                hidden += 1
                loss = loss + hidden.sum()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses, [one.detach().clone() for one in module.parameters()]


@pytest.mark.parametrize("mode", ["watch", "deep"])
@pytest.mark.parametrize(
    "settings",
    [{}, {"mixed_precision": "bf16"}, {"gradient_accumulation_steps": 2}],
    ids=["plain", "bf16", "accumulated"],
)
def test_a_right_training_is_the_same_with_it(settings, mode, forget_state):
    losses, parameters = train(**settings)
    forget_state()
    with gradsan.watch(mode) as watched:
        again, others = train(**settings)
    assert again == losses
    assert len(losses) == ROUNDS
    assert all(torch.equal(one, other) for one, other in zip(parameters, others, strict=True))
    assert watched.diagnoses == ()
    steps = ROUNDS // settings.get("gradient_accumulation_steps", 1)
    assert watched.report.seen.steps == steps
    assert watched.report.seen.backwards == ROUNDS


@pytest.mark.parametrize(("spoil", "code"), [("in place", "GS101"), ("step too early", "GS110")])
def test_a_failing_training_is_explained(spoil, code):
    with (
        pytest.raises(RuntimeError, match="modified by an inplace operation") as caught,
        gradsan.watch(language="en") as watched,
    ):
        train(spoil)
    [found] = watched.diagnoses
    assert found.code == code
    assert f"error[{code}]" in caught.value.__notes__[0]
    assert {label.role for label in found.labels} >= {"saved", "written", "used"}
    assert all(label.frame.file == __file__ for label in found.labels)


def test_a_loss_without_a_graph_is_the_argument(forget_state):
    accelerator = accelerate.Accelerator(cpu=True)
    net = accelerator.prepare(torch.nn.Linear(3, 1))
    level = net(torch.ones(2, 3)).detach()
    loss = level.mean()
    with pytest.raises(RuntimeError, match="does not require grad"), gradsan.watch() as watched:
        accelerator.backward(loss)
    [found] = watched.diagnoses
    assert (found.code, found.tensor.name, found.labels[0].op) == ("GS405", "loss", "detach")


def test_a_launched_program(tmp_path: Path):
    """``gradsan run`` in front of the script, as ``accelerate launch`` starts a module of its own."""
    (tmp_path / "main.py").write_text(LAUNCHED, encoding="utf-8")
    python, own = warm_python()
    launch = [
        python,
        "-m",
        "accelerate.commands.launch",
        "--cpu",
        "--num_processes",
        "1",
        "--num_machines",
        "1",
    ]
    launch += ["--mixed_precision", "no", "--dynamo_backend", "no", "-m", "gradsan", "run", "--lang", "en", "main.py"]
    env = {**os.environ, **own, "HF_HOME": str(tmp_path)}
    done = subprocess.run(launch, cwd=tmp_path, capture_output=True, text=True, timeout=120, env=env)
    assert "processes: 1" in done.stdout
    assert done.stderr.count("error[GS202]") == 1
    assert "curve.data.mul_(2)" in done.stderr
