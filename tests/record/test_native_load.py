"""The native core over a million operations of each kind, and under threads that come and go: nothing stays behind."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import gradsan
from core_kit import needs_native
from gradsan.record import log

pytestmark = [pytest.mark.long, needs_native]
RARE = {"writes", "steps", "backwards", "nodes", "clear", "core"}
"""What walks a whole log or makes one: in every thousandth round."""


def resident_mib() -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise AssertionError("no VmRSS")


def run(kinds: dict[str, Callable[[], object]], times: int) -> None:
    often = [operation for name, operation in kinds.items() if name not in RARE and "fails" not in name]
    rarely = [operation for name, operation in kinds.items() if name in RARE]
    for _ in range(times // 1000):
        for operation in often:
            for _ in range(1000):
                operation()
        for operation in rarely:
            operation()
        with pytest.raises(TypeError):
            kinds["backward that fails"]()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_million_operations_of_each_kind(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "native"))
    from failing_calls import operations

    core = log.make_core(True)
    core.active = True
    kinds = operations(core)
    held = [
        core,
        *kinds.values(),
        torch.add,
        torch.Tensor.add_,
        *(kind.__code__ for kind in kinds.values() if hasattr(kind, "__code__")),
    ]

    def settled() -> tuple[list[int], int, float]:
        core.clear()
        gc.collect()
        return [sys.getrefcount(one) for one in held], sys.getallocatedblocks(), resident_mib()

    run(kinds, 20_000)
    counts, blocks, resident = settled()
    run(kinds, 1_000_000)
    counts_after, blocks_after, resident_after = settled()
    assert max(abs(one - other) for one, other in zip(counts, counts_after, strict=True)) <= 5
    assert blocks_after - blocks < 2000
    assert resident_after - resident < 16
    assert core.running == []


def test_threads_come_and_go_while_watching_is_switched_on_and_off():
    failures, stop = [], threading.Event()

    def work() -> None:
        try:
            weight, local = torch.nn.Parameter(torch.ones(4)), torch.zeros(4)
            optimizer = torch.optim.SGD([weight], lr=0.01)
            for number in range(40):
                (weight * local).exp().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                local.add_(1)
                local[number % 4] = 0
        except BaseException as failure:
            failures.append(failure)

    def keep_starting() -> None:
        while not stop.is_set():
            one = threading.Thread(target=work)
            one.start()
            one.join()

    def turn(times: int) -> tuple[int, float]:
        stop.clear()
        starters = [threading.Thread(target=keep_starting) for _ in range(3)]
        for one in starters:
            one.start()
        try:
            for _ in range(times):
                with gradsan.watch():
                    torch.zeros(2).add_(1)
        finally:
            stop.set()
            for one in starters:
                one.join()
        gc.collect()
        return sys.getallocatedblocks(), resident_mib()

    switch = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        blocks, resident = turn(100)
        blocks_after, resident_after = turn(300)
    finally:
        sys.setswitchinterval(switch)
    assert failures == []
    assert blocks_after - blocks < 20_000
    assert resident_after - resident < 32
