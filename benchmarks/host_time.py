"""Host time that watch mode adds to a training step, by operation, and the steps for which that is less than 1 %.

    python benchmarks/host_time.py                              Markdown on stdout
    python benchmarks/host_time.py --write docs/performance.md  put the table between the page's markers

A device works beside the host: where the device is the slower one, what gradsan adds to the host's time costs nothing;
where the step is bound by launches, all of it. It depends on the operations of a step, not on their sizes. So each
workload of ``overhead.py`` runs on the CPU with the smallest tensors; plain and watched steps take turns, and the
median of the differences is what gradsan adds.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from overhead import Mode, modes, progress
from page import machine, machine_line, page_with, replace_between, table
from workloads import WORKLOADS, Step, Workload

SHARE = 0.01
_NOISE = 0.005
_TURN_SECONDS = 0.5
_WARM_UP = 70


@dataclass(frozen=True, slots=True)
class HostTime:
    """A row: operations that reach a kernel in one step, seconds of a plain step, seconds that watching adds to it."""

    workload: Workload
    operations: int
    plain: float
    added: float


class _Counter(TorchDispatchMode):
    """Counts the operations below autograd, those of the backward among them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: int = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += 1
        return func(*args, **(kwargs or {}))


def operations_of(step: Step) -> int:
    """How many operations one step asks for."""
    counter = _Counter()
    with counter:
        step()
    return counter.operations


def measure(workload: Workload, turns: int) -> HostTime:
    """Take turns of plain and watched steps, half a second each."""
    both = [mode for mode in modes() if mode.key in ("plain", "watch")]
    torch.manual_seed(0)
    step = (workload.smallest or workload.build)()
    seconds_of(step, _WARM_UP, both[0])
    steps = max(4, round(_TURN_SECONDS / seconds_of(step, 10, both[0])))
    plain, added = list[float](), list[float]()
    for turn in range(turns):
        seconds = {mode.key: seconds_of(step, steps, mode) for mode in both[:: 1 if turn % 2 else -1]}
        plain.append(seconds["plain"])
        added.append(seconds["watch"] - seconds["plain"])
        progress(f"{workload.key}: turn {turn + 1} of {turns}, {steps} steps each")
    return HostTime(workload, operations_of(step), statistics.median(plain), statistics.median(added))


def seconds_of(step: Step, steps: int, mode: Mode) -> float:
    """CPU time of the median step, once gradsan has looked at the first rounds of each line, as it does in any run."""
    gc.collect()
    spent = list[float]()
    with mode.switch():
        # One loop: the line that asks for a step is a part of what gradsan knows a round by.
        for _ in range(_WARM_UP + steps):
            start = time.process_time()
            step()
            spent.append(time.process_time() - start)
    return statistics.median(spent[_WARM_UP:])


def as_markdown(rows: Sequence[HostTime], turns: int) -> str:
    """The table; the last columns say from which step on watching adds less than ``SHARE``."""
    head = ["operations of", "operations a step", "plain host time", "added a step", "added an operation"]
    head += [f"less than {SHARE:.0%} from a step of", "that is, operations a millisecond"]
    cells = []
    for row in rows:
        cells.append([row.workload.title, str(row.operations), f"{row.plain * 1e3:.2f} ms", *_added(row)])
    note = f"CPU time of one thread on the smallest tensors, median of {turns} turns. {machine_line(machine())}"
    return f"{table(head, cells)}\n\n{note}\n"


def _added(row: HostTime) -> list[str]:
    if row.added < row.plain * _NOISE:
        return ["below the noise", "", "", ""]
    enough = row.added / SHARE
    return [
        f"{row.added * 1e6:.0f} µs",
        f"{row.added / row.operations * 1e6:.2f} µs",
        f"{enough * 1e3:.1f} ms",
        f"{row.operations / (enough * 1e3):.0f}",
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table, write what was asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--turns", type=int, default=9, metavar="N", help="turns for each workload (default 9)")
    parser.add_argument("--write", type=page_with("host"), metavar="PAGE", help="put the table into PAGE")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    text = as_markdown([measure(workload, options.turns) for workload in WORKLOADS], options.turns)
    progress("")
    print(text)
    if options.write:
        replace_between(options.write, "host", text)


if __name__ == "__main__":
    main()
