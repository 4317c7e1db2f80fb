"""The measurements of ``scale.py``, each run in a process of its own so that none finds the memory of another.

    python benchmarks/scale_probes.py '{"probe": "memory", "mode": "watch", "saves": 100000}'

prints its result as one line of JSON.
"""

from __future__ import annotations

import gc
import json
import resource
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

import gradsan
from scale_items import seconds_each

BATCH = 100
BATCHES = 60

Operation = Callable[[torch.Tensor], torch.Tensor]


def sin(value: torch.Tensor) -> torch.Tensor:
    """``torch.sin`` by its name in torch, as programs call it: a reference taken before watching starts is not seen."""
    return torch.sin(value)


def sigmoid(value: torch.Tensor) -> torch.Tensor:
    """As :func:`sin`."""
    return torch.sigmoid(value)


def turns(value: torch.Tensor) -> torch.Tensor:
    """Two operations by turns, from two lines: of the same one again and again, the log of Nodes keeps one entry."""
    value = torch.sin(value)
    return torch.cos(value)


OPERATIONS: dict[str, Operation] = {"sin": sin, "sigmoid": sigmoid, "turns": turns}
SAVES_EACH = {"sin": 1, "sigmoid": 1, "turns": 2}


def switch(mode: str) -> AbstractContextManager[Any]:
    """The context of a mode: ``plain``, ``watch``, ``deep``, or ``pure`` for watch without the native core."""
    if mode == "plain":
        return nullcontext()
    return gradsan.watch(mode="deep" if mode == "deep" else "watch", native=False if mode == "pure" else None)


def resident_bytes() -> int:
    """Memory of this process: what it holds now, or its peak where the system tells no more than that."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text(encoding="ascii").split()[1]) * resource.getpagesize()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def chain(start: torch.Tensor, length: int, operation: Operation = sin) -> torch.Tensor:
    """``operation`` applied ``length`` times, one saved tensor each."""
    value = start
    for _ in range(length):
        value = operation(value)
    return value


def memory(mode: str, saves: int, operation: str) -> dict[str, float]:
    """Bytes of the process for each saved tensor that is held alive, and for what the log keeps of its Node.

    As many again are held before the count begins: they fill the memory that making the wrappers has left free, which
    plain torch does not have (4 MB, and a process would seem to become smaller by being watched).
    """
    start = torch.ones((), requires_grad=True)
    with switch(mode):
        length = saves // SAVES_EACH[operation]
        held = chain(start, length, OPERATIONS[operation])
        gc.collect()
        before = resident_bytes()
        held = chain(held, length, OPERATIONS[operation])
        gc.collect()
        after = resident_bytes()
        del held
    return {"bytes": (after - before) / saves}


def growth(mode: str, steps: int) -> dict[str, float]:
    """Bytes the process grows by in a training step of 50 saves and 50 writes, once the bounded logs are full."""
    weight = torch.ones((), requires_grad=True)
    scratch = torch.zeros(())

    def run(count: int) -> None:
        for _ in range(count):
            chain(weight, 50).backward()
            weight.grad = None
            for _ in range(50):
                scratch.add_(1)

    with switch(mode):
        run(2000)
        gc.collect()
        before = resident_bytes()
        run(steps)
        gc.collect()
        return {"bytes": (resident_bytes() - before) / steps}


def live(mode: str, saves: list[int]) -> list[dict[str, float | None]]:
    """Seconds for one more operation, its backward and a write while ``saves`` saved tensors are held alive.

    ``growing`` is the time of each operation on the way there, garbage collection included; None where they were too
    few to tell.
    """
    start = torch.ones((), requires_grad=True)
    scratch = torch.zeros(())
    rows = []
    with switch(mode):
        chain(start, 1000).backward()
        held, alive = start, 0
        for count in saves:
            began = time.perf_counter()
            held = chain(held, count - alive)
            new, alive = count - alive, count
            growing = (time.perf_counter() - began) / new if new >= BATCH else None
            times: dict[str, list[float]] = {"save": [], "use": [], "write": []}
            for _ in range(BATCHES):
                marks = [time.perf_counter()]
                more = chain(start, BATCH)
                marks.append(time.perf_counter())
                more.backward()
                marks.append(time.perf_counter())
                for _ in range(BATCH):
                    scratch.add_(1)
                marks.append(time.perf_counter())
                for what, begin, end in zip(times, marks, marks[1:], strict=False):
                    times[what].append((end - begin) / BATCH)
            medians = {what: statistics.median(spent) for what, spent in times.items()}
            rows.append({"saves": float(count), "growing": growing, **medians})
    return rows


def failing_graph(mode: str, nodes: int) -> dict[str, Any]:
    """Seconds from the failing ``backward`` to its report, for a graph of ``nodes`` nodes that crosses an update.

    The old part of the graph is a chain of ``nodes`` operations; its last one needs ``weight``, which an update then
    overwrites; the loss hangs on it. PyTorch itself walks all nodes once before it starts and fails at the second one.
    """
    weight = torch.ones((), requires_grad=True)
    with switch(mode) as session:
        state = chain(weight, nodes) * weight
        with torch.no_grad():
            weight.sub_(0.1)
        loss = (state * weight).sum()
        began = time.perf_counter()
        try:
            loss.backward()
        except RuntimeError:
            codes = [diagnosis.code for diagnosis in session.report.diagnoses] if session else []
        else:
            raise SystemExit("the backward of this graph was to fail, and did not")
        seconds = time.perf_counter() - began
    return {"seconds": seconds, "codes": codes}


def items(mode: str, of: str, count: int) -> dict[str, float]:
    """Seconds for each of ``count`` items of a program of ``scale_items.py``."""
    with switch(mode):
        return {"seconds": seconds_each(of, count)}


PROBES: dict[str, Callable[..., Any]] = {
    "memory": memory,
    "growth": growth,
    "live": live,
    "failing_graph": failing_graph,
    "items": items,
}


def main() -> None:
    """Run the probe that the first argument describes."""
    request = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    print(json.dumps(PROBES[request.pop("probe")](**request)))


if __name__ == "__main__":
    main()
