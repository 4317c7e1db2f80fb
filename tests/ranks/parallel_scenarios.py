"""Trainings with DDP and FSDP2, run by two ranks: each plain, watched and in deep mode, and what came of it as JSON.

Each function computes something small on both ranks and gives what is to be the same with gradsan and without.
"""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import gradsan
from gradsan.record.recorder import recorder

MODES = ("plain", "watch", "deep")
ROUNDS = 40
SCENARIOS = []


def scenario(function):
    SCENARIOS.append(function)
    return function


def net(*, norm=False):
    torch.manual_seed(0)
    middle = nn.BatchNorm1d(8) if norm else nn.Identity()
    return nn.Sequential(nn.Linear(4, 8), middle, nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 1))


def batch():
    return torch.randn(6, 4)


def gradients(module):
    found = [one.grad for one in module.parameters() if one.grad is not None]
    return [(one.to_local() if hasattr(one, "to_local") else one).tolist() for one in found]


def train(module, optimizer, rounds=3):
    losses = []
    for _ in range(rounds):
        optimizer.zero_grad()
        loss = module(batch()).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def sharded(**settings):
    module = net()
    for layer in (module[0], module[3]):
        fully_shard(layer, **settings)
    return fully_shard(module)


@scenario
def ddp_right():
    module = DistributedDataParallel(net(norm=True))
    losses = train(module, torch.optim.Adam(module.parameters(), 0.01))
    with module.no_sync():
        module(batch()).mean().backward()
    module(batch()).mean().backward()
    return losses, gradients(module)


@scenario
def ddp_two_forwards_with_buffers_that_stay():
    """The sync before the second forward writes what was there already, into statistics that the first has saved."""
    module = DistributedDataParallel(net(norm=True))
    module(batch()).mean().backward()
    module.eval()
    (module(batch()).mean() + module(batch()).mean()).backward()
    return gradients(module)


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x):
        return self.layer(x) * self.scale


@scenario
def ddp_buffers_synchronised_while_a_graph_waits():
    module = DistributedDataParallel(Scaled())
    one = module(batch())
    if dist.get_rank() == 0:
        module.module.scale = torch.full((4,), 2.0)
    (one.sum() + module(batch()).sum()).backward()
    return gradients(module)


@scenario
def ddp_step_between_forward_and_backward():
    module = DistributedDataParallel(net())
    loss = module(batch()).mean()
    train(module, torch.optim.SGD(module.parameters(), 0.1), 1)
    loss.backward()


@scenario
def ddp_update_by_hand():
    module = DistributedDataParallel(net())
    loss = module(batch()).mean()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(0.5)
    loss.backward()


@scenario
def all_reduce_in_place():
    weight = torch.ones(3, requires_grad=True)
    curve = weight.exp()
    dist.all_reduce(curve.detach())
    curve.sum().backward()
    return weight.grad.tolist()


@scenario
def all_reduce_of_gradients():
    """As those do it who need no DDP."""
    module = net()
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    for _ in range(2):
        optimizer.zero_grad()
        module(batch()).mean().backward()
        for parameter in module.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        optimizer.step()
    return gradients(module)


@scenario
def a_conflict_on_one_rank_only():
    """In deep mode, too, the ranks have to meet in the same collectives."""
    module = sharded()
    hidden = module(batch())
    curve = hidden.exp()
    if dist.get_rank() == 1:
        curve.data.add_(1)
    curve.sum().backward()
    return gradients(module)


@scenario
def fsdp_right():
    module = sharded()
    losses = train(module, torch.optim.Adam(module.parameters(), 0.01))
    module.set_requires_gradient_sync(False)
    module(batch()).mean().backward()
    module.set_requires_gradient_sync(True)
    module(batch()).mean().backward()
    return losses, gradients(module)


@scenario
def fsdp_right_with_parameters_that_stay():
    module = sharded(reshard_after_forward=False)
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    losses = train(module, optimizer)
    loss = module(batch()).mean()
    optimizer.step()
    loss.backward()
    return losses, gradients(module)


@scenario
def fsdp_right_two_forwards():
    """The forward of a round whose loss is thrown away is older than the step, and nobody's business."""
    module = sharded()
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    module(batch()).mean()
    losses = train(module, optimizer, 2)
    (module(batch()).mean() + module(batch()).mean()).backward()
    return losses, gradients(module)


class Checkpointed(nn.Module):
    """Each block is run again in backward, while its parameters are gathered; in forward's end they are shards."""

    def __init__(self, **settings):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 8)
        self.block = fully_shard(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), **settings)

    def forward(self, x):
        return checkpoint(self.block, self.first(x), use_reentrant=False)


@scenario
def fsdp_right_checkpointed():
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    module = fully_shard(Checkpointed())
    losses = train(module, torch.optim.AdamW(module.parameters(), 0.01), 2)
    module = fully_shard(Checkpointed(mp_policy=half), mp_policy=half)
    return losses, train(module, torch.optim.AdamW(module.parameters(), 0.01), 2)


@scenario
def fsdp_update_before_the_recomputation():
    module = fully_shard(Checkpointed())
    loss = module(batch()).square().mean()
    with torch.no_grad():
        for parameter in module.block.parameters():
            parameter.mul_(2)
    loss.backward()
    return gradients(module)


@scenario
def fsdp_step_between_forward_and_backward():
    module = sharded()
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    module(batch()).mean().backward()
    loss = module(batch()).mean()
    optimizer.step()
    loss.backward()
    return gradients(module)


@scenario
def fsdp_update_by_hand():
    module = sharded()
    loss = module(batch()).mean()
    with torch.no_grad():
        for parameter in module[3].parameters():
            parameter.mul_(2)
    loss.backward()
    return gradients(module)


@scenario
def fsdp_second_backward_after_a_step():
    module = sharded(reshard_after_forward=False)
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    loss = module(batch()).mean()
    loss.backward(retain_graph=True)
    optimizer.step()
    loss.backward()
    return gradients(module)


@scenario
def a_long_run():
    """The same silent finding in every round."""
    module = DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(module.parameters(), 0.01)
    for _ in range(ROUNDS):
        optimizer.zero_grad()
        curve = module(torch.ones(2, 4)).sigmoid()
        curve.data.mul_(0.9)
        curve.sum().backward()
        optimizer.step()
    return gradients(module)


def told(watched):
    found = [one for one in watched.diagnoses if one.severity != "note"]
    return {
        "codes": sorted({one.code for one in found}),
        "tensors": sorted({one.tensor.name for one in found if one.tensor is not None}),
        "counts": [one.count for one in found],
        "silent": all(one.silent for one in found),
        "lines": sorted({label.frame.line for one in found for label in one.labels if label.role == "written"}),
        "kept": len(recorder().core.writes()),
        "text": str(watched),
    }


def run(function, mode):
    torch.manual_seed(dist.get_rank())
    watching = contextlib.nullcontext() if mode == "plain" else gradsan.watch(mode, language="en")
    with watching as watched:
        try:
            value = function()
        except RuntimeError as error:
            # Of the same error deep mode tells the version that it has found itself.
            value = str(error).partition(":")[0]
    return value, None if watched is None else told(watched)


def main():
    dist.init_process_group("gloo")
    found = {}
    for function in SCENARIOS:
        plain = None
        for mode in MODES:
            dist.barrier()
            value, said = run(function, mode)
            plain = value if mode == "plain" else plain
            if said is not None:
                found[f"{function.__name__} {mode}"] = {**said, "value": value, "same": value == plain}
    Path(f"{sys.argv[1]}.{dist.get_rank()}").write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
