"""Right programs with leaves that an installed package keeps for itself (GS423), or that torch traces: no warning."""

from __future__ import annotations

import runpy
import sys
import threading
from pathlib import Path

import pytest
import torch
from quiet_programs import warnings_about

import gradsan
from cases import each
from gradsan.record.recorder import recorder

LIBRARY = """
import torch
from torch import nn

class Codes(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("zero", torch.tensor(0.0), persistent=False)
        self.zero.requires_grad_()

    def forward(self, x):
        return x + (x.round() - x).detach(), self.zero * x.pow(2).mean()
"""
PROGRAM = """
import torch
from copies import Codes
net, codes = torch.nn.Linear(3, 4), Codes()
optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
for _ in range(6):
    code, extra = codes(net(torch.randn(8, 3)))
    loss = code.pow(2).mean() + extra
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@each("mode", ["watch", "deep"])
def test_not_a_warning(mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packages = tmp_path / mode / "site-packages"
    packages.mkdir(parents=True)
    (packages / "copies.py").write_text(LIBRARY, encoding="utf-8")
    program = packages.parent / "train.py"
    program.write_text(PROGRAM, encoding="utf-8")
    monkeypatch.syspath_prepend(str(packages))
    monkeypatch.delitem(sys.modules, "copies", raising=False)
    recorder().core.clear()
    torch.manual_seed(0)
    watched = gradsan.watch(mode)
    # What calls the program is no code of the user's, as under ``gradsan run``.
    thread = threading.Thread(target=watched(runpy.run_path), args=(str(program),))
    thread.start()
    thread.join()
    monkeypatch.delitem(sys.modules, "copies", raising=False)
    assert [(one.code, one.severity) for one in watched.diagnoses if one.severity != "note"] == []


def backward_traced_on_fake_tensors() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    def forward(weight: torch.Tensor, given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = torch.relu(given @ weight)
        return hidden.view(-1, 4) @ weight, hidden

    def gradients(weight: torch.Tensor, given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out, hidden = traced(weight, given)
        return torch.autograd.grad(out.sum(), [weight, hidden])

    values = torch.randn(4, 4, requires_grad=True), torch.randn(2, 3, 4)
    traced = make_fx(forward, tracing_mode="fake", _allow_non_fake_inputs=True)(*values)
    for _ in range(3):
        make_fx(gradients, tracing_mode="fake", _allow_non_fake_inputs=True)(*values)


@pytest.mark.parametrize("mode", ["watch", "deep"])
def test_a_view_made_anew_from_a_cache_of_shapes_writes_nothing(mode: str) -> None:
    assert warnings_about([backward_traced_on_fake_tensors], mode) == {}
