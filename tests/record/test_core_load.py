"""Both cores under many threads and many calls."""

import gc
import resource
import sys
import threading
import weakref
from pathlib import Path

import pytest
import torch

from core_kit import constants, needs_native, plain
from gradsan.record import log


def test_many_threads(patched):
    threads, rounds = 6, 60
    failures = []
    exp = plain(patched, torch.exp)

    def work():
        try:
            local = torch.zeros(4)
            for number in range(rounds):
                result = exp(torch.ones(4, requires_grad=True))
                local.add_(1)
                local[number % 4] = 0
                torch.add(local, 1, out=local)
                result.sum().backward()
                if number == rounds // 2:
                    patched.writes(), patched.nodes_near(number, threading.get_ident()), gc.collect()
        except BaseException as failure:
            failures.append(failure)

    running = [threading.Thread(target=work) for _ in range(threads)]
    switch = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
    finally:
        sys.setswitchinterval(switch)
    assert failures == []
    assert patched.log_errors == 0
    if patched.is_native:
        # The pure core's counters are Python integers, which threads may miscount between two bytecodes.
        assert patched.write_count == len(patched.writes()) == threads * rounds * 3
        assert patched.saves == threads * rounds
        clocks = [entry[0] for entry in patched.writes()]
        assert clocks == sorted(set(clocks))


def test_clearing_while_others_log(patched):
    stop = threading.Event()
    exp, leaf = plain(patched, torch.exp), torch.ones(2, requires_grad=True)

    def work():
        local = torch.zeros(4)
        while not stop.is_set():
            local.add_(1)
            exp(leaf)

    running = [threading.Thread(target=work) for _ in range(3)]
    for thread in running:
        thread.start()
    try:
        for _ in range(200):
            patched.clear()
            for entry in patched.writes():
                assert len(entry) == 15
            patched.nodes_near(0, running[0].ident)
            patched.ran_since(patched.stack(), 0, running[0].ident)
    finally:
        stop.set()
        for thread in running:
            thread.join()


def resident_pages():
    return int(Path("/proc/self/statm").read_text().split()[1])


@needs_native
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("rounds", [10_000, pytest.param(100_000, marks=pytest.mark.long)])
def test_calls_leave_nothing_behind(rounds):
    """Of ten kinds in each round: a million of them with ``--long``."""
    core = log.make_core(True)
    core.active = True
    leaf, other, key = torch.ones(3, requires_grad=True), torch.zeros(2, 3), (slice(0, 1), 2)
    outputs = (leaf,)
    optimizer = torch.optim.SGD([leaf, other], lr=0.1)
    view = plain(core, torch.Tensor.__getitem__)
    add = core.writer(torch.Tensor.add_, "add_", "inplace", 0, None)
    setitem = core.writer(torch.Tensor.__setitem__, "__setitem__", "setitem", 0, None)
    out = core.writer(torch.add, "add", "out", -1, "out")
    backward = core.engine(lambda outputs, *args, **kwargs: None)
    failing = core.engine(len)
    core.on_failure = lambda record, error: None
    sparse = torch.ones(2, 2).to_sparse()

    def turn(count):
        for _ in range(count):
            view(leaf, 0)
            view(leaf, 1)
            add(other, 1)
            setitem(other, key, 1.0)
            out(other, 1, out=other)
            core.step_begin(optimizer, (), {})
            core.step_end(optimizer, (), {})
            backward(outputs, None, False, accumulate_grad=True)

    def rare(count):
        for _ in range(count):
            core.log_write(sparse, "op", "kind", None, core.stack())
            core.writer(torch.Tensor.add_, "add_", "inplace", 0, None)(other, 1)
            core.nodes_near(0, threading.get_ident())
            core.step_begin(None, (), {})
            for wrong in (lambda: add(), lambda: failing(3), lambda: core.engine(1)(3), lambda: core.stack("x")):
                with pytest.raises((TypeError, AttributeError)):
                    wrong()

    watched = (leaf, outputs, other, key, optimizer, core, add, turn.__code__, torch.add, "add_", "inplace", "begin")
    turn(rounds)
    rare(500)
    core.writes(), core.clear()
    gc.collect()
    turn(rounds)
    pages = resident_pages()
    core.clear()
    counts = [sys.getrefcount(item) for item in watched]
    turn(rounds)
    grown = resident_pages() - pages
    # What the log of Nodes holds: at most 40 bytes each, in a ring that doubles.
    assert grown < 500 + 2 * 40 * 2 * rounds / resource.getpagesize()
    rare(500)
    core.writes(), core.clear()
    gc.collect()
    after = [sys.getrefcount(item) for item in watched]
    assert all(abs(one - other) <= 20 for one, other in zip(counts, after, strict=True)), (counts, after)
    assert core.running == []


def test_a_log_that_wrapped_lets_its_stacks_go(core):
    tensor = torch.ones(1)
    core.active = True
    add = core.writer(torch.Tensor.add_, "add_", "inplace", 0, None)
    for _ in range(constants(core).WRITES_KEPT + 1000):
        add(tensor, 1)
    written = core.writes()[-1][10]
    core.clear()
    gc.collect()
    assert sys.getrefcount(written) <= 3


def test_a_log_may_be_cleared_while_it_is_read(core):
    core.active = True
    exp, leaf, thread = plain(core, torch.exp), torch.ones(2, requires_grad=True), threading.get_ident()
    for _ in range(3):
        exp(leaf)
        core.tick()
    expected = core.nodes_near(0, thread)

    class Clearing:
        def __init__(self):
            self.itself = self

        def __del__(self):
            core.clear()

    gc.collect()
    gc.disable()
    before = gc.get_threshold()
    Clearing()
    gc.set_threshold(1)
    try:
        # Up to Python 3.11 an allocation collects garbage itself.
        gc.enable()
        found = core.nodes_near(0, thread)
    finally:
        gc.set_threshold(*before)
        gc.enable()
    gc.collect()
    assert found in (expected, []), "as it was before or after, and nothing in between"
    assert core.nodes_near(0, thread) == []


def test_a_core_in_a_cycle_is_collected(core):
    class Owner:
        def failed(self, record, error):
            return error

    owner = Owner()
    owner.core = log.make_core(core.is_native)
    owner.core.on_failure = owner.failed
    owner.engine = owner.core.engine(len)
    owner.engine.home = owner
    owner.writer = owner.core.writer(torch.Tensor.add_, "add_", "inplace", 0, None)
    owner.listener = owner.core.listener(len, None, owner.failed)
    owner.core.active = True
    owner.writer(torch.ones(1), 1)
    plain(owner.core, torch.exp)(torch.ones(1, requires_grad=True))
    seen = weakref.ref(owner)
    del owner
    gc.collect()
    assert seen() is None
