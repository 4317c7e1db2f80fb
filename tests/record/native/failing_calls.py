"""The native core while its own calls fail for want of memory: no crash, and programs compute what they would.

    python tests/record/native/failing_calls.py [rounds]

runs every kind of operation on a core that was built with failing.h (tools/native_checks.py does), one in 3, 10 and 50
of the core's calls failing at random. What is logged may be lost; results may not, references and order must not be.
"""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from gradsan.originals.comparing import saved_values
from gradsan.originals.originals import Kept
from gradsan.record import _native, log

ROUNDS = 3000


def operations(core: Any) -> dict[str, Callable[[], Any]]:
    """What the core does, each by one call that can be repeated."""
    add = core.writer(torch.Tensor.add_, "add_", "inplace", 0, None)
    setitem = core.writer(torch.Tensor.__setitem__, "__setitem__", "setitem", 0, None)
    out = core.writer(torch.add, "add", "out", -1, "out")
    foreach = core.writer(torch._foreach_add_, "_foreach_add_", "foreach", 0, None)
    exp = core.writer(torch.exp, "exp", "plain", -1, None)
    operator = core.writer(torch.ops.aten.sin.default, "sin", "operator", -1, None)
    engine, failing = core.engine(lambda outputs, *_, **__: outputs), core.engine(len)
    leaf, other, counted = torch.ones(3, requires_grad=True), torch.zeros(2, 3), torch.zeros(())
    many = [torch.zeros(2) for _ in range(12)]
    outputs, several = (leaf.sum(),), [leaf.sum(), leaf.sin().sum()]
    optimizer = torch.optim.SGD([leaf, *many], lr=0.1)
    key = (slice(0, 1), 2)
    here = threading.get_ident()

    values = saved_values(core, lambda tensor: Kept(tensor, False, 0, None, 0), lambda kept: kept.alias, (), ())
    result, moved = (leaf * 1).exp(), torch.zeros(2, 3)
    kept, others = values.pack(result), values.pack(moved[0])
    moved.data[1] = 1
    handing = core.engine(lambda outputs, *_, **__: [values.unpack(one) for one in (kept, others)])

    def hand_out() -> None:
        with torch.no_grad():
            given = handing(outputs, None, False, True)
        assert torch.equal(given[0], result)
        assert torch.equal(given[1], moved[0])

    def counts() -> None:
        before = counted.item()
        try:
            add(counted, 1)
        finally:
            assert counted.item() == before + 1, "the program's own operation is done, and once"

    return {
        "add_": counts,
        "setitem": lambda: setitem(other, key, 1.0),
        "out": lambda: out(other, 1, out=other),
        "foreach": lambda: foreach(many, 1),
        "exp": lambda: exp(leaf),
        "operator": lambda: operator(leaf),
        "step": lambda: (core.step_begin(optimizer, (), {}), core.step_end(optimizer, (), {})),
        "backward": lambda: engine(outputs, None, False, accumulate_grad=True),
        "backward of several": lambda: engine(several, (None, None), True, True),
        "save": lambda: (values.pack(leaf), values.pack(result)),
        "hand out": hand_out,
        "doubtful": values.doubtful,
        "backward that fails": lambda: failing(3),
        "stack": core.stack,
        "stacks anew": lambda: eval("core.stack()", {"core": core}),
        "writes": core.writes,
        "steps": lambda: core.step_log,
        "backwards": lambda: core.backward_log,
        "nodes": lambda: core.nodes_near(3, here),
        "clear": core.clear,
        "writer": lambda: core.writer(torch.Tensor.add_, "add_", "inplace", 0, "out"),
        "bound": lambda: add.__get__(other),
        "engine": lambda: core.engine(len),
        "core": type(core),
        "tick": core.tick,
    }


def main(rounds: int) -> int:
    """Run all of it and print what became of it."""
    library = ctypes.PyDLL(_native.__file__)
    failing = ctypes.c_int.in_dll(library, "gradsan_failing")
    failed = ctypes.c_longlong.in_dll(library, "gradsan_failed")
    core = log.make_core(True)
    core.active = True
    for name in (
        "on_enter",
        "on_leave",
        "on_nodes",
        "on_nonfinite",
        "on_quiet",
        "on_operator",
        "on_round",
        "on_step_begin",
        "on_write",
    ):
        setattr(core, name, lambda *_: None)
    core.on_failure = core.on_differentiable = core.on_gradients = lambda *_: None
    core.tells_all_writes, core.quiet_nodes = True, 1
    kinds = operations(core)
    kept = [core, *kinds.values()]
    counts = [sys.getrefcount(one) for one in kept]
    ends: Counter[str] = Counter()
    for one_in in (3, 10, 50):
        for number in range(rounds):
            for name, operation in kinds.items():
                failing.value = one_in
                try:
                    operation()
                except (MemoryError, TypeError) as error:
                    failing.value = 0
                    if isinstance(error, TypeError) and name != "backward that fails":
                        raise
                    ends[type(error).__name__] += 1
                else:
                    failing.value = 0
                    ends["finished"] += 1
            assert core.running == [] or core.log_errors, "calls that ended are not running"
            if number % 500 == 0:
                gc.collect()
    core.clear()
    gc.collect()
    after = [sys.getrefcount(one) for one in kept]
    assert all(abs(one - other) <= 5 for one, other in zip(counts, after, strict=True)), (counts, after)
    other = torch.zeros(2, 3)
    core.writer(torch.Tensor.add_, "add_", "inplace", 0, None)(other, 1)
    assert (len(core.writes()), core.log_errors, other.sum().item()) == (1, 0, 6)
    print(f"{sum(ends.values()):,} operations, {failed.value:,} calls failed: {dict(ends)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else ROUNDS))
