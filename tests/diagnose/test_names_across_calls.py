"""A value that a helper or a hook overwrites is called what the function that saved it calls it."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

import gradsan
from cases import each

MODULE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.feat, self.side, self.main = nn.Linear(3, 6), nn.Linear(6, 2), nn.Linear(6, 2)
        self.act = nn.Sigmoid()
        self.tail = nn.Sequential(nn.Identity(), nn.Linear(6, 2))

    def forward(self, x):
        h = self.feat(x)
        s = self.side(h)
        return s.sum() + self.probe(h).sum()

    def probe(self, h):
        {probe}

class Halving:
    def __call__(self, module, inputs):
        inputs[0].mul_(0.5)

    def of_output(self, module, inputs, output):
        output.mul_(0.5)

def halve_input(module, inputs):
    inputs[0].mul_(0.5)

def halve_named(module, inputs):
    value = inputs[0]
    value.mul_(0.5)

def halve_keyword(module, args, kwargs):
    kwargs["input"].mul_(0.5)

def halve_output(module, inputs, output):
    output.mul_(0.5)

net = Net()
{register}
net(torch.randn(4, 3)).backward()
"""

DIRECT = "return self.main(h)"
CASES = {
    "pre-hook": (DIRECT, "net.main.register_forward_pre_hook(halve_input)", "h"),
    "pre-hook that gives its argument a name": (DIRECT, "net.main.register_forward_pre_hook(halve_named)", "h"),
    "pre-hook with keywords": (
        "return self.main(input=h)",
        "net.main.register_forward_pre_hook(halve_keyword, with_kwargs=True)",
        "h",
    ),
    "hook that is an object": (DIRECT, "net.main.register_forward_pre_hook(Halving())", "h"),
    "lambda": (DIRECT, "net.main.register_forward_pre_hook(lambda m, i: i[0].mul_(0.5))", "h"),
    "output": ("o = self.act(h)\n        return o", "net.act.register_forward_hook(halve_output)", "o"),
    "output, by a bound method": (
        "o = self.act(h)\n        return o",
        "net.act.register_forward_hook(Halving().of_output)",
        "o",
    ),
    "output without a name at the call": (
        "return self.act(h)",
        "net.act.register_forward_hook(halve_output)",
        "output",
    ),
    "inner module of a container": (
        "return self.tail(h)",
        "net.tail[1].register_forward_pre_hook(halve_input)",
        "inputs[0]",
    ),
}


def name_found_in(program: str, folder: Path) -> str | None:
    file = folder / "program.py"
    file.write_text(program)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"), gradsan.watch() as watched:
        exec(compile(program, str(file), "exec"), {"__name__": "program"})
    (diagnosis,) = watched.diagnoses
    assert diagnosis.tensor is not None
    return diagnosis.tensor.name


@each(("probe", "register", "name"), CASES.values(), ids=CASES)
def test_of_a_hook(probe: str, register: str, name: str, tmp_path: Path) -> None:
    assert name_found_in(MODULE.replace("{probe}", probe).replace("{register}", register), tmp_path) == name


def test_of_a_helper_that_gives_its_argument_another_name(tmp_path: Path) -> None:
    program = """
    import torch

    def scale(values):
        flat = values.view(-1)
        flat.mul_(2)

    x = torch.ones(2, 2, requires_grad=True)
    y = x.exp()
    scale(y)
    y.sum().backward()
    """
    assert name_found_in(textwrap.dedent(program), tmp_path) == "y"
