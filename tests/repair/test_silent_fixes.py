"""Kinds of fixes, each by a program that it mends: most run to their end in PyTorch, with a wrong gradient."""

from pathlib import Path

import pytest

from gradsan.repair import Limits, find_fixes
from gradsan.text import say

PROGRAMS = Path(__file__).parents[1] / "detect" / "silent" / "programs"
ALWAYS = {"gradient_overwritten_in_hook", "gradient_kept_in_training"}

GAN = """
import torch
from torch import nn

torch.manual_seed(0)
G, D = nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))
G = nn.Sequential(G, nn.Tanh(), nn.Linear(4, 4))
g_opt, d_opt = torch.optim.Adam(G.parameters()), torch.optim.Adam(D.parameters())
for _ in range(2):
    fake = G(torch.randn(6, 3))
    g_opt.zero_grad()
    D(fake).mean().backward(retain_graph=True)
    g_opt.step()
    d_opt.zero_grad()
    loss = D(fake).exp().mean()
    loss.backward()
    d_opt.step()
"""
HANDED_OUT = """
import torch

torch.manual_seed(0)
w = torch.rand(3, requires_grad=True)
h = w.sigmoid()
out = (h * h).sum()
shown = h.detach().numpy()
shown -= shown.mean()
out.backward()
"""
ON_CONTEXT = """
import torch


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.x = x.detach()
        return x * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * ctx.x * grad


w = torch.ones(3, requires_grad=True)
h = w * 2
out = Square.apply(h).sum()
h.data.mul_(0.1)
out.backward()
"""
FORGOTTEN = """
import torch
from torch import nn

torch.manual_seed(0)
net = nn.Linear(3, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(5):
    loss = net(torch.randn(5, 3)).pow(2).mean()
    loss.backward()
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    opt.zero_grad()
    print(f"{loss:.3f}")
"""
PENALTY = """
import torch
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(2):
    optimizer.zero_grad()
    net(torch.randn(5, 3)).pow(2).mean().backward(create_graph=True)
    penalty = sum(p.grad.pow(2).sum() for p in net.parameters())
    optimizer.zero_grad(set_to_none=False)
    penalty.backward()
    optimizer.step()
"""


def search(folder, monkeypatch, text):
    (folder / "main.py").write_text(text)
    monkeypatch.chdir(folder)
    target = ("script", "main.py", ())
    return find_fixes(target, Limits(), lambda _: None, lambda message: say(message, "en"), folder)


def first_that_passed(found):
    assert found.patches
    return next(fix for fix in found.diagnoses[0].fixes if fix.verification.status == "passed")


@pytest.mark.parametrize(
    ("program", "code", "kind", "meaning", "added"),
    [
        pytest.param(program, *expected, marks=() if program in ALWAYS else pytest.mark.long, id=program)
        for program, *expected in (
            ("argument_normalised", "GS216", "leave_the_argument", "changed", "x = x - x.mean(1, keepdim=True)"),
            ("gradient_kept_by_hand", "GS214", "clear_gradient", "changed", "w.grad = None"),
            ("gradient_kept_in_training", "GS214", "clear_by_optimizer", "changed", "optimizer.zero_grad()"),
            ("gradient_kept_of_input", "GS214", "clear_gradient", "changed", "delta.grad = None"),
            ("gradient_opposed_in_gan", "GS214", "clear_between", "changed", "g_optimizer.zero_grad()"),
            ("gradient_overwritten_in_function", "GS213", "return_new_gradient", "preserved", "return grad.neg()"),
            ("gradient_overwritten_in_hook", "GS213", "return_new_gradient", "preserved", "gradient = gradient * 0.1"),
            (
                "value_clamped_through_data",
                "GS215",
                "record_the_change",
                "changed",
                "probs = probs.masked_fill(probs < 0.2, 0.2)",
            ),
            ("value_scaled_under_no_grad", "GS215", "record_the_change", "changed", "hidden = hidden.mul(keep)"),
            ("value_state_zeroed", "GS215", "change_a_copy", "changed", "self.state = torch.zeros_like(self.state)"),
        )
    ],
)
def test_a_silent_fault_is_mended(tmp_path, monkeypatch, program, code, kind, meaning, added):
    found = search(tmp_path, monkeypatch, (PROGRAMS / f"{program}.py").read_text())
    fix = first_that_passed(found)
    assert (found.diagnoses[0].code, fix.kind, fix.meaning) == (code, kind, meaning)
    assert any(row.startswith("+") and row[1:].strip() == added for row in fix.diff.splitlines())
    # Nothing is called automatic that changes what the program computes.
    assert fix.applicability == ("automatic" if meaning == "preserved" else "review")
    assert fix.how_changed is None or meaning == "changed"
    if meaning == "preserved":
        assert fix.verification.gradient_difference == 0


def test_a_forgotten_step_comes_after_the_backward_and_its_clip(tmp_path, monkeypatch):
    found = search(tmp_path, monkeypatch, FORGOTTEN)
    fix = first_that_passed(found)
    assert (found.diagnoses[0].code, fix.kind, fix.meaning) == ("GS424", "step_after_backward", "changed")
    rows = fix.diff.splitlines()
    assert rows[rows.index("+    opt.step()") - 1] == "     nn.utils.clip_grad_norm_(net.parameters(), 1.0)"


CLEARED_BY_A_CALLBACK = """
import torch
from torch import nn
torch.manual_seed(0)
net = nn.Linear(4, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
class Norms:
    seen = []
    def after_backward(self):
        self.seen.append(float(net.weight.grad.norm()))
        net.zero_grad()
class Quiet:
    def after_backward(self):
        net.zero_grad()
callback = CALLBACK()
for _ in range(6):
    def closure():
        opt.zero_grad()
        loss = net(torch.randn(8, 4)).square().mean()
        loss.backward()
        callback.after_backward()
        return loss
    opt.step(closure)
"""


@pytest.mark.parametrize(("kind", "changed"), [("Norms", "-        net.zero_grad()"), ("Quiet", "+        pass")])
def test_gradients_that_are_cleared_twice_are_cleared_once(tmp_path, monkeypatch, kind, changed):
    found = search(tmp_path, monkeypatch, CLEARED_BY_A_CALLBACK.replace("CALLBACK", kind))
    fix = first_that_passed(found)
    assert (found.diagnoses[0].code, fix.kind, fix.meaning) == ("GS424", "clear_once", "changed")
    assert changed in fix.diff.splitlines()


@pytest.mark.long
@pytest.mark.parametrize(
    ("text", "code", "kind", "added"),
    [
        (GAN, "GS110", "detach_other_network", "    loss = D(fake.detach()).exp().mean()"),
        (HANDED_OUT, "GS203", "clone_before_mutation", "shown = h.detach().clone().numpy()"),
        (PENALTY, "GS311", "set_to_none", "    optimizer.zero_grad(set_to_none=True)"),
        (ON_CONTEXT, "GS211", "copy_on_context", "        ctx.x = x.detach().clone()"),
    ],
    ids=["other_network", "handed_out", "let_go", "on_context"],
)
def test_detached_or_copied_values_keep_the_gradients(tmp_path, monkeypatch, text, code, kind, added):
    found = search(tmp_path, monkeypatch, text)
    fix = first_that_passed(found)
    assert (found.diagnoses[0].code, fix.kind, fix.meaning) == (code, kind, "preserved")
    assert f"+{added}" in fix.diff.splitlines()


@pytest.mark.long
@pytest.mark.parametrize(
    ("rounds", "clears_first", "meaning", "how"),
    [
        (1, True, "preserved", None),
        (1, False, "changed", "fix.left_gradients_differ"),
        (2, False, "changed", "help.detach_other_network_how"),
    ],
)
def test_a_round_shows_the_next_only_if_it_clears(tmp_path, monkeypatch, rounds, clears_first, meaning, how):
    text = GAN.replace("range(2)", f"range({rounds})")
    if not clears_first:
        text = text.replace("    g_opt.zero_grad()\n", "").replace(
            "g_opt.step()\n", "g_opt.step()\n    g_opt.zero_grad()\n"
        )
    found = search(tmp_path, monkeypatch, text)
    fix = next(one for one in found.diagnoses[0].fixes if one.kind == "detach_other_network")
    assert (fix.verification.status, fix.meaning) == ("passed", meaning)
    assert (None if fix.how_changed is None else fix.how_changed.key) == how


def test_a_clone_is_no_repair_of_a_write_that_may_have_been_part_of_the_computation(tmp_path, monkeypatch):
    text = (
        "import torch\n"
        "torch.manual_seed(0)\n"
        "net = torch.nn.Linear(3, 2)\n"
        "opt = torch.optim.SGD(net.parameters(), lr=0.1)\n"
        "for _ in range(3):\n"
        "    y = torch.sigmoid(net(torch.randn(4, 3)))\n"
        "    y.data *= 2\n"
        "    opt.zero_grad()\n"
        "    y.sum().backward()\n"
        "    opt.step()\n"
    )
    (fault,) = search(tmp_path, monkeypatch, text).diagnoses
    passed = {fix.kind: fix for fix in fault.fixes if fix.verification.status == "passed"}
    assert next(iter(passed)) == "record_the_change"
    # After it gradsan finds that y is changed where autograd does not record, and then read.
    clone = next(fix for fix in fault.fixes if fix.kind == "clone_before_mutation")
    assert clone.verification.status == "failed", clone
    assert clone.verification.training in (None, "rejected")


PROJECTED = """
import torch
from torch import nn
torch.manual_seed(0)
class Factors(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.rand(5, 2))
    def project(self):
        self.w = nn.Parameter(self.w.data.clamp(min=0))
model = Factors()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(6):
    loss = (model.w @ model.w.t() - 1).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    model.project()
"""


def test_what_each_round_makes_anew_is_not_added_to_the_optimizer_in_each(tmp_path, monkeypatch):
    (found,) = search(tmp_path, monkeypatch, PROJECTED).diagnoses
    assert found.code == "GS420"
    assert not any("add_param_group" in (fix.diff or "") for fix in found.fixes)
