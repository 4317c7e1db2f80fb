"""Fixes of data parallel programs, on one rank: arguments of DDP and checkpoint, and a step under fully_shard."""

import ast
from dataclasses import replace

import pytest

from cases import each
from gradsan.model import Diagnosis, Fix, Frame, Label, Message, Site
from gradsan.repair import Limits, find_fixes
from gradsan.repair.fixes import arguments
from gradsan.repair.libraries import untried
from gradsan.repair.patch import Patch
from gradsan.source.change import apply_change, edited, with_keyword
from gradsan.source.tree import read_source
from gradsan.text import say

OPENING = """
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
torch.manual_seed(0)
"""
READY_TWICE = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = nn.Linear(4, 4)

    def forward(self, x):
        x = checkpoint(self.block, x, use_reentrant=True)
        return checkpoint(self.block, x, use_reentrant=True)


net = DistributedDataParallel(Net(), find_unused_parameters=True)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(3):
    optimizer.zero_grad()
    net(torch.ones(2, 4, requires_grad=True)).sum().backward()
    optimizer.step()
"""
SHARDED = """
G = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4))
D = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
for module in (G, D[2], D):
    fully_shard(module)
g, d = torch.optim.SGD(G.parameters(), lr=0.1), torch.optim.SGD(D.parameters(), lr=0.1)
for _ in range(2):
    fake = G(torch.randn(4, 3))
    score = D(fake)
    d.zero_grad()
    score.exp().mean().backward(retain_graph=True)
    d.step()
    g.zero_grad()
    (-score).mean().backward()
    g.step()
"""
CLOSING = "dist.destroy_process_group()\n"


@each(
    ("call", "told"),
    [
        ("DDP()", "DDP(a=1)"),
        ("DDP(net)", "DDP(net, a=1)"),
        ("DDP((net))", "DDP((net), a=1)"),
        ("DDP(net, a=0, **more)", "DDP(net, a=1, **more)"),
        ("DDP(net, **more)", "DDP(net, **more, a=1)"),
        ("DDP(\n    net,  # it\n    b=f(1, 2),\n)", "DDP(\n    net,  # it\n    b=f(1, 2), a=1,\n)"),
        ("DDP(net, a=1)", None),
        ("DDP(x for x in y)", None),
    ],
)
def test_a_call_is_given_an_argument(tmp_path, call, told):
    file = tmp_path / "program.py"
    file.write_text(call)
    source = read_source(str(file))
    edit = with_keyword(source, ast.parse(call).body[0].value, "a", "1")
    change = None if edit is None else edited(source, [edit], "argument")
    assert (None if change is None else apply_change(call, change)) == told


@each(
    ("kind", "wrapped", "told"),
    [
        ("static_graph", "DDP(net)", "DDP(net, static_graph=True)"),
        (
            "static_graph",
            "nn.parallel.DistributedDataParallel(net)",
            "nn.parallel.DistributedDataParallel(net, static_graph=True)",
        ),
        ("keep_buffers_local", "DDP(net, broadcast_buffers=True)", "DDP(net, broadcast_buffers=False)"),
        ("keep_buffers_local", "Wrapped(net)", None),
        ("another", "DDP(net)", None),
    ],
)
def test_the_wrapper_gets_the_advised_argument(tmp_path, kind, wrapped, told):
    file = tmp_path / "program.py"
    file.write_text(f"net = {wrapped}\nnet(x).sum().backward()\n")
    found = arguments.find_unused_parameters_in_ddp(advised(file, kind))
    texts = [Patch().with_lines(fix.lines).files[str(file)].decode().split("\n")[0] for fix in found]
    assert texts == ([] if told is None else [f"net = {told}"])


def advised(file, kind):
    frame = Frame(str(file), 2, "<module>", 1, 2, 25, is_user=True)
    said = Message("title.any")
    label = Label("used", frame, said, None, Site((frame,)))
    return Diagnosis("GS513", "any", "error", False, said, said, (label,), fixes=(Fix(kind, "preserved", said),))


def test_of_what_was_not_run_nothing_is_claimed(tmp_path):
    file = tmp_path / "program.py"
    file.write_text("net = DDP(net)\nnet(x).sum().backward()\n")
    said = Message("help.any")
    lines = [((str(file), 1, f"net = {name}(net)"),) for name in ("A", "A", "B", "C")]
    fixes = [Fix("static_graph", "preserved", said, applicability="automatic", lines=one) for one in lines]
    broken = Fix("static_graph", "preserved", said, lines=((str(file), 1, "net = ("),))
    shown = untried(replace(advised(file, "any"), fixes=(broken, *fixes)), 2, tmp_path).fixes
    assert [bool(fix.diff) for fix in shown] == [True, True, False, False]
    assert not any(fix.lines for fix in shown)
    for fix in shown[:2]:
        assert (fix.meaning, fix.applicability, fix.verification.status) == ("changed", "review", "not_run")
        assert fix.how_changed.key == "fix.not_run_how"
    assert [row for row in shown[1].diff.splitlines() if row.startswith("+n")] == ["+net = B(net)"]


def search(tmp_path, monkeypatch, text):
    (tmp_path / "main.py").write_text(OPENING + text + CLOSING)
    monkeypatch.chdir(tmp_path)
    found = find_fixes(("script", "main.py", ()), Limits(), lambda _: None, lambda m: say(m, "en"), tmp_path)
    assert found.patches
    return found


@pytest.mark.long
def test_a_gradient_that_came_twice(tmp_path, monkeypatch):
    (fault,) = search(tmp_path, monkeypatch, READY_TWICE).diagnoses
    assert fault.code == "GS513"
    tried = {fix.kind: (fix.meaning, fix.verification.gradient_difference) for fix in fault.fixes}
    assert tried == {"not_reentrant": ("preserved", 0), "static_graph": ("preserved", 0)}


@pytest.mark.long
def test_a_step_under_fully_shard_is_held_against_what_the_forward_had(tmp_path, monkeypatch):
    found = search(tmp_path, monkeypatch, SHARDED)
    plain = search(tmp_path, monkeypatch, SHARDED.replace("    fully_shard(module)", "    pass"))
    sharded, alone = found.diagnoses[0], plain.diagnoses[0]
    assert (sharded.code, alone.code) == ("GS217", "GS110")
    assert not found.seen.blind_spots
    best = sharded.fixes[0]
    assert (best.kind, best.meaning, best.verification.gradient_difference) == ("reorder_step", "preserved", 0)
    # The reference of both is the same: what changes the gradients does it by as much.
    summed = [fix for fault in (sharded, alone) for fix in fault.fixes if fix.summary.key == "fix.reorder_step"]
    assert [fix.meaning for fix in summed] == ["changed", "changed"]
    differences = [fix.verification.gradient_difference for fix in summed]
    assert differences[0] == pytest.approx(differences[1], rel=1e-4)
