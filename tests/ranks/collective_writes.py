"""Run in two ranks: every collective into a value that autograd has saved, plain, watched and in deep mode.

Prints a JSON line: for each collective and kind of saved value the truth (what plain PyTorch does, beside the right
gradient) and the verdict of each mode.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gradsan

warnings.simplefilter("ignore")
dist.init_process_group("gloo")
rank = dist.get_rank()


def received(t: Any) -> None:
    if rank:
        dist.recv(t, src=0)
    else:
        dist.send(torch.full((4,), 5.0), dst=1)


def gathered(t: Any) -> None:
    dist.gather(torch.full((4,), 5.0), [t, torch.empty(4)] if rank == 0 else None, dst=0)


def scattered(t: Any) -> None:
    dist.scatter(t, [torch.full((4,), 5.0), torch.full((4,), 6.0)] if rank == 0 else None, src=0)


COLLECTIVES: dict[str, Callable[[Any], Any]] = {
    "all_reduce": lambda t: dist.all_reduce(t),
    "all_reduce, async": lambda t: dist.all_reduce(t, async_op=True).wait(),
    "broadcast": lambda t: dist.broadcast(t, src=0),
    "reduce": lambda t: dist.reduce(t, dst=0),
    "scatter": scattered,
    "all_to_all_single": lambda t: dist.all_to_all_single(t, torch.full((4,), 5.0 + rank)),
    "recv": received,
    "all_gather": lambda t: dist.all_gather([t, torch.empty(4)], torch.full((4,), 5.0)),
    "all_gather_into_tensor": lambda t: dist.all_gather_into_tensor(t, torch.full((2,), 5.0)),
    "reduce_scatter_tensor": lambda t: dist.reduce_scatter_tensor(t, torch.full((8,), 5.0)),
    "gather": gathered,
    "all_reduce_coalesced": lambda t: dist.all_reduce_coalesced([t]),
    "torch.ops._c10d_functional": lambda t: torch.ops._c10d_functional.wait_tensor(
        torch.ops._c10d_functional.all_reduce_(t, "sum", dist.group.WORLD.group_name)
    ),
}


def leaf() -> Any:
    return torch.tensor([0.5, 1.0, 1.5, 2.0], requires_grad=True)


def into_an_operand(write: Callable[[Any], Any] | None) -> Any:
    x = leaf()
    t = x * (2 + rank)
    loss = (t * t).sum()
    return x, loss, lambda: write(t.detach()) if write else None


def into_a_buffer(write: Callable[[Any], Any] | None) -> Any:
    x, t = leaf(), torch.full((4,), 2.0 + rank)
    return x, (x * t).sum(), lambda: write(t) if write else None


class Scaled(torch.nn.Module):
    """Multiplies by a buffer that each rank has its own value of, until they are synchronised."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4))
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: Any) -> Any:
        return x * self.weight * self.scale


def synchronised(write: bool | None) -> Any:
    net = DistributedDataParallel(Scaled(), broadcast_buffers=bool(write))
    with torch.no_grad():
        net.module.scale.fill_(3.0 + rank)
    first = net.module(torch.ones(4))
    return net.module.weight, first.sum(), lambda: net(torch.ones(4)) if write else None


def outcome(build: Callable[[Any], Any], write: Any) -> Any:
    """The gradient, or what PyTorch says instead."""
    x, loss, go = build(write)
    go()
    try:
        return torch.autograd.grad(loss, x)[0]
    except RuntimeError as error:
        return str(error).partition(":")[0]


def truth(build: Callable[[Any], Any], write: Any) -> str:
    right, got = outcome(build, None), outcome(build, write)
    return "raises" if isinstance(got, str) else "right" if torch.equal(right, got) else "wrong"


def verdict(mode: Any, build: Callable[[Any], Any], write: Any) -> str:
    with gradsan.watch(mode) as watched:
        outcome(build, write)
    errors = [one for one in watched.diagnoses if one.severity == "error" and one.code[:3] in ("GS1", "GS2")]
    if any(one.gradient.status == "raised" for one in errors):
        return "raises"
    return "wrong" if errors else "right"


cells = {
    f"{name} {build.__name__}": (build, write)
    for name, write in COLLECTIVES.items()
    for build in (into_an_operand, into_a_buffer)
}
cells["DDP's sync of buffers"] = (synchronised, True)
truths = {name: truth(*cell) for name, cell in cells.items()}
told: dict[str, dict[str, str]] = {}
for mode in ("watch", "deep"):
    with gradsan.watch(mode):
        told[mode] = {name: verdict(mode, *cell) for name, cell in cells.items()}
print(json.dumps({name: [truths[name], told["watch"][name], told["deep"][name]] for name in cells}))
dist.destroy_process_group()
