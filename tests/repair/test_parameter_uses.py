"""Whose gradients statements clear, by what the file shows of its optimizers and helpers."""

import ast

import pytest

from gradsan.repair.fixes._parameter_uses import clears, hands_on
from gradsan.source.tree import read_source

SETUP = """g, d, both = Net(), Net(), Pair()
opt_g = Adam(g.parameters())
opt_d = Adam(d.parameters())
opt_part = Adam(both.d.parameters())
opt_list = Adam(weights)
def reset():
    g.zero_grad()
    d.zero_grad()
def reset_g():
    opt_g.zero_grad()
def reset_all(opts):
    for opt in opts:
        opt.zero_grad()
def other(x):
    return x * 2
opt_g.step(), opt_d.step(), opt_list.step(), opt_part.step()
"""
CLEARED = {
    "opt_d.zero_grad()": {"opt_d"},
    "opt_g.zero_grad(set_to_none=True)": {"opt_g"},
    "d.zero_grad()": {"opt_d", "opt_list"},
    "both.zero_grad()": {"opt_part", "opt_list"},
    "reset()": {"opt_g", "opt_d", "opt_list"},
    "reset_g()": {"opt_g"},
    "reset_all([opt_g])": {"opt_g", "opt_d", "opt_list", "opt_part"},
    "for opt in (opt_g, opt_d): opt.zero_grad()": {"opt_g", "opt_d", "opt_list", "opt_part"},
    "if flag: opt_d.zero_grad()": {"opt_d"},
    "p.grad = None": {"opt_g", "opt_d", "opt_list", "opt_part"},
    "p.grad.zero_()": {"opt_g", "opt_d", "opt_list", "opt_part"},
    "loss = other(g(x))": set(),
    "x.zero_()": set(),
}


@pytest.mark.parametrize(("line", "expected"), CLEARED.items())
def test_optimizers_whose_gradients_a_line_clears(tmp_path, line, expected):
    file = tmp_path / "train.py"
    file.write_text(SETUP + line + "\n")
    source = read_source(str(file))
    statement = source.module.body[-1]
    assert isinstance(statement, ast.stmt)
    optimizers = ("opt_g", "opt_d", "opt_list", "opt_part")
    assert {one for one in optimizers if clears(source, [statement], one)} == expected


HANDED_ON = {
    "for slow, fast in zip(old.parameters(), d.parameters()): slow.data.lerp_(fast.data, 0.1)": {"opt_d"},
    "best = copy.deepcopy(both.d.state_dict())": {"opt_part"},
    "soft_update(old, g)": {"opt_g"},
    "follow()": {"opt_g"},
    "report(d(x))": set(),
    "clip_grad_norm_(d.parameters(), 1.0)": set(),
    "for p in d.parameters(): p.grad = None": set(),
    "total += sum(p.grad.norm() for p in g.parameters())": set(),
    "loss = other(d(x))": set(),
    "reset()": set(),
}


@pytest.mark.parametrize(("line", "expected"), HANDED_ON.items())
def test_optimizers_whose_parameters_a_line_reads(tmp_path, line, expected):
    follow = "def follow():\n    for a, b in zip(old.parameters(), g.parameters()):\n        a.data.copy_(b.data)\n"
    follow += "def report(value):\n    print(value.data.item())\n"
    file = tmp_path / "train.py"
    file.write_text(f"{SETUP}{follow}{line}\n")
    source = read_source(str(file))
    optimizers = ("opt_g", "opt_d", "opt_list", "opt_part")
    assert {one for one in optimizers if hands_on(source, source.module.body[-1:], one)} == expected
