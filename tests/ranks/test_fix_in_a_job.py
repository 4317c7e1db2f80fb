"""``gradsan fix`` in a job of two ranks: each shows what may help, and neither runs it."""

from __future__ import annotations

import json

from job import run_pair

PROGRAM = """
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x):
        return self.layer(x) * self.scale


dist.init_process_group("gloo")
torch.manual_seed(0)
net = DDP(Scaled(), device_ids=None)
one = net(torch.ones(2, 4))
if dist.get_rank() == 0:
    net.module.scale = torch.full((4,), 2.0)
(one.sum() + net(torch.ones(2, 4)).sum()).backward()
dist.destroy_process_group()
"""
WITH_REPORT = (
    "import os, sys; from gradsan.cli import main; sys.exit(main(['fix', '--json', os.environ['RANK'], 'main.py']))"
)


def test_candidates_are_shown_and_not_run(tmp_path):
    (tmp_path / "main.py").write_text(PROGRAM)
    ended = run_pair(tmp_path, "-c", WITH_REPORT)
    assert [one.returncode for one in ended] == [0, 1], ended[0].stderr + ended[1].stderr
    assert "trying" not in ended[1].stderr
    assert "nothing was tried" in ended[1].stderr
    assert json.loads((tmp_path / "0").read_text())["diagnoses"] == []
    report = json.loads((tmp_path / "1").read_text())
    (fault,) = report["diagnoses"]
    assert fault["code"] == "GS207"
    fix = fault["fixes"][0]
    assert (fix["kind"], fix["meaning"], fix["verification"]["status"]) == ("keep_buffers_local", "changed", "not_run")
    assert "sync_buffers=False)" in fix["diff"] or "broadcast_buffers=False)" in fix["diff"]
    assert any("2 ranks" in one for one in report["seen"]["blind_spots"])
