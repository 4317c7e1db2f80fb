"""Both cores under many threads and many calls."""

import gc
import sys
import threading
import weakref
from pathlib import Path

import pytest
import torch
from core_kit import constants, hooked, needs_native, value

from gradsan.capture import _core


def test_many_threads(patched):
    threads, rounds = 6, 150
    failures = []

    def work():
        try:
            local = torch.zeros(4)
            for number in range(rounds):
                with hooked(patched):
                    result = torch.ones(4, requires_grad=True).exp()
                local.add_(1)
                local[number % 4] = 0
                torch.add(local, 1, out=local)
                result.sum().backward()
                if number % 50 == 0:
                    patched.writes(), patched.recent_saves(), gc.collect()
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

    def work():
        local = torch.zeros(4)
        while not stop.is_set():
            local.add_(1)
            patched.pack(local)

    running = [threading.Thread(target=work) for _ in range(3)]
    for thread in running:
        thread.start()
    try:
        for _ in range(200):
            patched.clear()
            for entry in patched.writes():
                assert len(entry) == 15
            patched.recent_saves()
    finally:
        stop.set()
        for thread in running:
            thread.join()


def resident_pages():
    return int(Path("/proc/self/statm").read_text().split()[1])


@needs_native
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_million_calls_leave_nothing_behind():
    core = _core.make_core(True)
    tensor, other, key, moved = value(), torch.zeros(2, 3), (slice(0, 1), 2), core.pack(value())
    moved.tensor.add_(1)
    core.on_stale = lambda save: None
    core.active = True
    add = core.writer(torch.Tensor.add_, "add_", "inplace", 0, None)
    setitem = core.writer(torch.Tensor.__setitem__, "__setitem__", "setitem", 0, None)
    out = core.writer(torch.add, "add", "out", -1, "out")
    sparse = torch.ones(2, 2).to_sparse()

    def turn(count):
        with torch.no_grad():
            for _ in range(count):
                core.unpack(core.pack(tensor))
                core.unpack(moved)
                add(other, 1)
                setitem(other, key, 1.0)
                out(other, 1, out=other)

    def rare(count):
        for _ in range(count):
            core.log_write(sparse, "op", "kind", None, core.stack())
            core.writer(torch.Tensor.add_, "add_", "inplace", 0, None)(other, 1)
            for wrong in (lambda: add(), lambda: core.pack(3), lambda: core.unpack(3), lambda: core.stack("x")):
                with pytest.raises((TypeError, AttributeError)):
                    wrong()

    watched = (tensor, other, key, moved, None, True, core, add, turn.__code__, torch.add, "add_", "inplace", 1)
    turn(40_000)
    rare(500)
    core.writes(), core.recent_saves(), core.clear()
    gc.collect()
    turn(40_000)
    pages = resident_pages()
    core.clear()
    counts = [sys.getrefcount(item) for item in watched]
    turn(200_000)
    assert resident_pages() - pages < 500
    rare(500)
    core.writes(), core.recent_saves(), core.clear()
    gc.collect()
    after = [sys.getrefcount(item) for item in watched]
    assert all(abs(one - other) <= 20 for one, other in zip(counts, after, strict=True)), (counts, after)


def test_a_log_that_wrapped_lets_its_stacks_go(core):
    tensor = torch.ones(1)
    core.active = True
    add = core.writer(torch.Tensor.add_, "add_", "inplace", 0, None)
    for _ in range(constants(core).SAVES_KEPT + 1000):
        saved = core.pack(tensor).stack
        add(tensor, 1)
    written = core.writes()[-1][10]
    core.clear()
    gc.collect()
    for stack in (saved, written):
        assert sys.getrefcount(stack) <= 4


def test_a_core_in_a_cycle_is_collected(core):
    class Owner:
        def stale(self, save):
            return save

    owner = Owner()
    owner.core = _core.make_core(core.is_native)
    owner.core.on_stale = owner.stale
    owner.writer = owner.core.writer(torch.Tensor.add_, "add_", "inplace", 0, None)
    owner.writer.home = owner
    owner.core.active = True
    owner.writer(torch.ones(1), 1)
    owner.core.pack(torch.ones(1))
    seen = weakref.ref(owner)
    del owner
    gc.collect()
    assert seen() is None


@needs_native
def test_a_save_is_small():
    core = _core.make_core(True)
    save = core.pack(value())
    assert sys.getsizeof(save) <= 56
    assert not gc.is_tracked(save)
