"""``gradsan run`` and ``gradsan fix`` on programs whose tensors lie on a device: as on the CPU, but for its name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from device_runs import run_python

HEAD = """\
import sys

import torch
from torch import nn

device = sys.argv[1]
if device.startswith("simulated"):
    import simulated
if device.startswith("openreg"):
    import torch_openreg
torch.manual_seed(0)
"""
PROGRAMS = {
    "stepped": """\
model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.ones(2, 3).to(device)
out = model(x)
first, second = out.mean(), out.square().mean()
first.backward(retain_graph=True)
optimizer.step()
second.backward()
""",
    "carried": """\
cell = nn.RNNCell(3, 4).to(device)
optimizer = torch.optim.Adam(cell.parameters())
state = torch.zeros(2, 4).to(device)
for step in range(3):
    state = cell(torch.ones(2, 3).to(device), state)
    loss = state.sum()
    optimizer.zero_grad()
    loss.backward(retain_graph=True)
    optimizer.step()
""",
    "mixed": """\
scale = torch.ones(3, requires_grad=True)
moved = (scale * 2).to(device)
hidden = moved.sigmoid()
hidden += 1
hidden.cpu().sum().backward()
""",
    "silent": """\
weight = torch.ones(3, device=device, requires_grad=True)
hidden = weight * 2
loss = (hidden * hidden).sum()
hidden.data.add_(1)
loss.backward()
""",
    "not a number": """\
weight = torch.zeros(3, device=device, requires_grad=True)
optimizer = torch.optim.SGD([weight], lr=0.1)
loss = (weight.sqrt() * 0).sum()
loss.backward()
optimizer.step()
print(weight.isnan().any().item())
""",
}
# No process group of torch's takes tensors of a simulated device: this one has one process, and nothing to send.
PROGRAMS["distributed"] = """\
import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future


def done(result):
    future = torch.futures.Future()
    future.set_result(result)
    return _create_work_from_future(future)


class Alone(dist.ProcessGroup):
    def allreduce(self, tensors, options=None):
        return done(tensors)

    def broadcast(self, tensors, options=None):
        return done(tensors)

    def allgather(self, gathered, given, options=None):
        gathered[0][0].copy_(given[0])
        return done(gathered)


kinds = ["cpu", device.partition(":")[0]]
dist.Backend.register_backend("alone", lambda store, rank, size, timeout: Alone(rank, size), devices=kinds)
dist.init_process_group("alone", store=dist.HashStore(), rank=0, world_size=1)
layers = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).to(device)
model = nn.parallel.DistributedDataParallel(layers)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(5, 3).to(device)
for step in range(3):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
loss = model(x).square().mean()
optimizer.step()
loss.backward()
"""
MODES = {"silent": "--deep", "not a number": "--nonfinite"}


def run_on(device: str, folder: Path, program: str, *options: str, command: str = "run") -> tuple[int, Any, str]:
    file, report = folder / "train.py", folder / "report.json"
    file.write_text(HEAD + program, encoding="utf-8")
    report.unlink(missing_ok=True)
    done = run_python(folder, "-m", "gradsan", command, *options, "--json", str(report), str(file), device)
    assert report.is_file(), done.stderr
    return done.returncode, json.loads(report.read_text(encoding="utf-8")), done.stderr


def told(report: Any) -> list[Any]:
    return [
        (
            one["code"],
            one["severity"],
            one["tensor"]["name"] if one["tensor"] else None,
            [(label["role"], label["line"]) for label in one["labels"]],
            one["gradient"],
        )
        for one in report["diagnoses"]
    ]


@pytest.mark.parametrize("name", PROGRAMS)
def test_reported_as_on_the_cpu(name: str, device: str, tmp_path: Path) -> None:
    options = (MODES[name],) if name in MODES else ()
    status, on_cpu, _ = run_on("cpu", tmp_path, PROGRAMS[name], *options)
    assert on_cpu["diagnoses"]
    came, report, shown = run_on(device, tmp_path, PROGRAMS[name], *options)
    assert (came, told(report)) == (status, told(on_cpu))
    assert {one["tensor"]["device"] for one in report["diagnoses"] if one["tensor"]} <= {device}
    assert f"error[{report['diagnoses'][0]['code']}]" in shown


def test_a_fix_is_tried_on_the_device(device: str, tmp_path: Path) -> None:
    _, on_cpu, _ = run_on("cpu", tmp_path, PROGRAMS["carried"], command="fix")
    _, report, _ = run_on(device, tmp_path, PROGRAMS["carried"], command="fix")

    def passed(one: Any) -> list[str]:
        fixes = one["diagnoses"][0]["fixes"]
        return [fix["kind"] for fix in fixes if fix["verification"]["status"] == "passed"]

    assert passed(on_cpu)
    assert passed(report) == passed(on_cpu)
