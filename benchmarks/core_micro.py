"""Cost of one recorded call, for each core: ``python benchmarks/core_micro.py [stack depth]``.

Nanoseconds, with so many Python frames on the stack (10 unless given otherwise). What the same thing costs without
gradsan is taken off: the original from its wrapper, an empty call from the rest.
"""

from __future__ import annotations

import functools
import math
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from gradsan.record import log

ROUNDS = 150
CALLS = 400


def at_depth(depth: int, run: Callable[[], float]) -> float:
    """Call ``run`` with ``depth`` Python frames on the stack, its own included."""
    here, frame = 0, sys._getframe()
    while frame is not None:
        here, frame = here + 1, frame.f_back  # type: ignore[assignment]
    return run() if here + 1 >= depth else at_depth(depth, run)


def nanoseconds(call: Callable[[], Any], without: Callable[[], Any], depth: int) -> float:
    """What ``call()`` costs more than ``without()``: the two take turns, the best round of each counts."""
    clock, calls = time.perf_counter_ns, range(CALLS)

    def run(timed: Callable[[], Any]) -> float:
        begin = clock()
        for _ in calls:
            timed()
        return (clock() - begin) / CALLS

    best = [math.inf, math.inf]
    for _ in range(ROUNDS):
        for turn, timed in enumerate((call, without)):
            best[turn] = min(best[turn], at_depth(depth, functools.partial(run, timed)))
    return best[0] - best[1]


def assignment_cost(setitem: Any, depth: int) -> float:
    """What ``tensor[0] = 1.0`` costs more while ``setitem`` is in the place of ``torch.Tensor.__setitem__``."""
    tensor = torch.zeros(4)

    def assign() -> None:
        tensor[0] = 1.0

    def cost() -> float:
        return nanoseconds(assign, int, depth)

    plain = cost()
    torch.Tensor.__setitem__ = setitem  # type: ignore[method-assign]
    try:
        return cost() - plain
    finally:
        del torch.Tensor.__setitem__


def measure(core: Any, depth: int) -> dict[str, float]:
    """Nanoseconds by name."""
    small, partial = torch.zeros(4), functools.partial
    leaf = torch.ones(4, requires_grad=True)
    optimizer = torch.optim.SGD([torch.ones(4, requires_grad=True) for _ in range(10)], lr=0.1)
    exp = core.writer(torch.exp, "exp", "plain", -1, None)
    item = core.writer(torch.Tensor.__getitem__, "__getitem__", "plain", -1, None)
    run_backward = core.engine(no_engine)
    zero = core.writer(torch.Tensor.zero_, "zero_", "inplace", 0, None)
    add = core.writer(torch.add, "add", "out", -1, "out")
    setitem = core.writer(torch.Tensor.__setitem__, "__setitem__", "setitem", 0, None)
    nothing = partial(int)
    zeroing = partial(zero, small), partial(torch.Tensor.zero_, small)
    adding = partial(add, small, 1.0), partial(torch.add, small, 1.0)
    adding_out = partial(add, small, 1.0, out=small), partial(torch.add, small, 1.0, out=small)

    found = {
        "stack": nanoseconds(core.stack, nothing, depth),
        "wrapper, switched off": nanoseconds(*zeroing, depth),
    }
    core.active = True
    with torch.enable_grad():
        found["a Node"] = nanoseconds(partial(exp, leaf), partial(torch.exp, leaf), depth)
        getting = partial(item, leaf, 0), partial(torch.Tensor.__getitem__, leaf, 0)
        found["a Node of x[0]"] = nanoseconds(*getting, depth)
    found |= {
        "wrapper, no Node, no out=": nanoseconds(*adding, depth),
        "logged zero_": nanoseconds(*zeroing, depth),
        "logged out=": nanoseconds(*adding_out, depth),
        "logged x[0] = 1.0": assignment_cost(setitem, depth),
    }
    entering = partial(run_backward, (leaf,), None, False), partial(no_engine, (leaf,), None, False)
    found["a backward"] = nanoseconds(*entering, depth)
    found["a step begins, 10 parameters"] = nanoseconds(partial(core.step_begin, optimizer, (), {}), nothing, depth)
    found["a step ends, 10 parameters"] = nanoseconds(partial(core.step_end, optimizer, (), {}), nothing, depth)
    core.active = False
    return found


def no_engine(outputs: Any, *rest: Any) -> None:
    """Stands where the engine stands."""


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    depth = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    cores = {"pure": log.make_core(False)}
    if log.native_available():
        cores["native"] = log.make_core(True)
    with torch.no_grad():
        columns = {name: measure(core, depth) for name, core in cores.items()}
    print(f"{f'ns per call, {depth} frames':<30}" + "".join(f"{name:>10}" for name in columns))
    for row in columns["pure"]:
        print(f"{row:<30}" + "".join(f"{column[row]:>10.0f}" for column in columns.values()))
    if "native" not in cores:
        print("the C core was not built for this Python")


if __name__ == "__main__":
    main()
