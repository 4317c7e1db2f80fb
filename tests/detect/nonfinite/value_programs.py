"""Head, tail and runner of programs with NaN and Inf."""

import runpy
import textwrap

import torch

import gradsan

SETUP = """
import torch
from torch import nn
from torch.nn import functional as F
torch.manual_seed(0)
"""


def run(program, tmp_path):
    """The findings of a program, and its lines by the comment that marks them; to be called in a process of its own."""
    source = SETUP + textwrap.dedent(program)
    file = tmp_path / "train.py"
    file.write_text(source, encoding="utf-8")
    watched = gradsan.watch("nonfinite")
    try:
        with watched:
            runpy.run_path(str(file))
    except ValueError as error:
        # Raised by the program itself, or by a distribution.
        if str(error) not in source and "invalid values" not in str(error):
            raise
    finally:
        torch.use_deterministic_algorithms(False)
    assert not watched.report.seen.blind_spots
    return watched.diagnoses, {mark: line_of(source, mark) for mark in ("origin", "noticed")}


def line_of(source, mark):
    return next((number for number, line in enumerate(source.splitlines(), 1) if line.endswith(f"# {mark}")), None)


def training(rounds=4):
    """The rounds that train ``parameters`` with ``loss_of``."""
    return f"""
optimizer = torch.optim.SGD(parameters, lr=0.01)
for batch in range({rounds}):
    loss = loss_of(batch)
    optimizer.zero_grad()
    loss.backward()  # noticed
    optimizer.step()
"""
