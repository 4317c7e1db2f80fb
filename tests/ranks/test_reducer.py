"""Errors of DistributedDataParallel's reducer on two ranks, explained by each of them."""

from __future__ import annotations

import pytest

NET = """
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = nn.Linear(4, 4)
        self.spare = nn.Linear(4, 4)

    def forward(self, x):
        x = checkpoint(self.block, x, use_reentrant=True)
        return checkpoint(self.block, x, use_reentrant=True)


"""
TWICE = """
net = DistributedDataParallel(Net(), find_unused_parameters=True)
net(torch.ones(2, 4, requires_grad=True)).sum().backward()
"""
UNFINISHED = """
class Plain(Net):
    def forward(self, x):
        return self.block(x)


net = DistributedDataParallel(Plain())
for _ in range(2):
    net(torch.ones(2, 4)).sum().backward()
"""
CASES = {"GS513": (TWICE, "block."), "GS514": (UNFINISHED, "spare.weight")}


@pytest.mark.parametrize("code", CASES)
def test_the_reducer_is_explained_on_both_ranks(run_warm, code):
    program, name = CASES[code]
    job = run_warm(NET + program)
    assert job.status == 1, job.stderr
    assert (job.codes(0), job.codes(1)) == ([code], [code])
    assert job.stderr.count(f"error[{code}]") == 1
    (found,) = job.reports[0]["diagnoses"]
    assert name in found["title"]
    assert {"used"} <= {label["role"] for label in found["labels"]}
