"""Right trainings with FullyShardedDataParallel: no finding on a rank that holds parts of the parameters."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

import gradsan
from cases import each
from gradsan.record.recorder import recorder

CPU = torch.device("cpu")


@pytest.fixture(params=[0, 1])
def rank(request):
    dist.init_process_group("fake", store=FakeStore(), rank=request.param, world_size=2)
    yield request.param
    dist.destroy_process_group()


class Net(nn.Module):
    def __init__(self, original):
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 1)
        self.inner = FullyShardedDataParallel(nn.Linear(8, 8), device_id=CPU, use_orig_params=original)

    def forward(self, x, again=False):
        x = checkpoint(self.first, x, use_reentrant=False) if again else self.first(x)
        x = checkpoint(self.inner, x, use_reentrant=False) if again else self.inner(x)
        return self.last(x.tanh())


def sharded(original):
    torch.manual_seed(0)
    return FullyShardedDataParallel(Net(original), device_id=CPU, use_orig_params=original)


def plain_rounds(net, optimizer):
    for _ in range(5):
        optimizer.zero_grad()
        net(torch.rand(6, 4)).pow(2).mean().backward()
        optimizer.step()


def accumulated(net, optimizer):
    for _ in range(3):
        with net.no_sync():
            net(torch.rand(6, 4)).pow(2).mean().backward()
        net(torch.rand(6, 4)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def checkpointed(net, optimizer):
    for _ in range(3):
        optimizer.zero_grad()
        checkpoint(net, torch.rand(6, 4), use_reentrant=False).pow(2).mean().backward()
        optimizer.step()


def checkpointed_inside(net, optimizer):
    for _ in range(3):
        optimizer.zero_grad()
        net(torch.rand(6, 4), again=True).pow(2).mean().backward()
        optimizer.step()


def evaluated_in_between(net, optimizer):
    for _ in range(3):
        with torch.no_grad():
            net(torch.rand(6, 4))
        optimizer.zero_grad()
        (net(torch.rand(6, 4)).mean() + net(torch.rand(6, 4)).pow(2).mean()).backward()
        optimizer.step()


@each("mode", ["watch", "deep", "heal"])
@each("original", [True, False])
@each("training", [plain_rounds, accumulated, checkpointed, checkpointed_inside, evaluated_in_between])
def test_nothing_is_said(rank, training, original, mode, pytestconfig):
    # The modes have the same detectors: on the second rank the others only with --long.
    if rank and mode != "watch" and not pytestconfig.getoption("--long"):
        return
    recorder().core.clear()
    with gradsan.watch(mode) as watched:
        net = sharded(original)
        training(net, torch.optim.Adam(net.parameters(), lr=0.01))
    # The fake group leaves memory of the other rank as it was: NaN may lie there.
    assert [(one.code, one.severity) for one in watched.diagnoses if one.code != "GS605"] == []
