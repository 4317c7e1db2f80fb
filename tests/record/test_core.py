"""A core: how it is made, what it shows, what it forgets."""

import gc
import sys
import threading

import pytest
import torch

from core_kit import needs_native, plain
from gradsan.record import _core_pure, log


def test_the_environment_can_ask_for_pure_python(monkeypatch):
    monkeypatch.setenv("GRADSAN_NATIVE", "0")
    assert not log.make_core().is_native
    monkeypatch.delenv("GRADSAN_NATIVE")
    assert log.make_core().is_native == log.native_available()


def test_a_missing_c_core_is_said_only_when_asked_for(monkeypatch):
    monkeypatch.setitem(sys.modules, "gradsan.record._native", None)
    monkeypatch.delattr("gradsan.record._native", raising=False)
    assert not log.native_available()
    assert not log.make_core().is_native
    with pytest.raises(ImportError):
        log.make_core(True)


def test_a_fresh_core(core):
    assert (core.active, core.clock, core.saves, core.write_count, core.steps) == (False, 0, 0, 0, 0)
    assert (core.open_steps, core.log_errors, core.backwards, core.on_failure) == (0, 0, 0, None)
    assert core.writes() == core.nodes_near(0, 0) == core.running == core.step_log == core.backward_log == []
    assert not core.lost_writes_after(0)
    assert not core.ran_since(core.stack(), 0, 0)


def test_attributes_can_be_set(core):
    core.active = True
    core.on_failure = len
    names = ("clock", "saves", "write_count", "steps", "open_steps", "step_changes", "log_errors", "backwards")
    for number, name in enumerate(names, start=2**33):
        setattr(core, name, number)
        assert getattr(core, name) == number
    assert core.active is True
    assert core.on_failure is len


def test_running_is_the_core_s_own(core):
    running = core.running
    with pytest.raises(AttributeError):
        core.running = []
    assert core.running is running


@needs_native
def test_the_cores_show_the_same_names():
    from gradsan.record import _native

    # What the pure core's own wrappers call; the C core's are C as well.
    inner = {"forgive", "log_nodes", "stack_from"}
    names = [{name for name in dir(core) if name[0] != "_"} for core in (_core_pure.Core(), _native.Core())]
    assert names[0] - inner == names[1]
    names = [{name for name in dir(module.Stack) if name[0] != "_"} for module in (_core_pure, _native)]
    assert names[0] == names[1]
    for name in ("WRITES_KEPT", "NODES_KEPT", "STACKS_KEPT", "DEPTH_KEPT"):
        assert getattr(_native, name) == getattr(_core_pure, name)


def test_clear_forgets_the_logs_and_keeps_the_clock(core):
    core.active = True
    core.writer(torch.Tensor.mul_, "mul_", "inplace", 0, None)(torch.ones(2), 2)
    made = plain(core, torch.exp)(torch.ones(2, requires_grad=True)).grad_fn._sequence_nr()
    here = threading.get_ident()
    assert len(core.nodes_near(made, here)) == 1
    clock = core.tick()
    core.clear()
    assert core.writes() == core.nodes_near(made, here) == []
    assert (core.saves, core.write_count, core.clock) == (0, 0, clock)


class Shy(torch.Tensor):
    """A subclass that overrides what the C core otherwise reads by descriptor, in Python code."""

    calls: list

    @classmethod
    def __torch_function__(cls, function, kinds, args=(), kwargs=None):
        cls.calls.append(getattr(function, "__name__", str(function)))
        return super().__torch_function__(function, kinds, args, kwargs or {})


def test_a_subclass_does_not_hear_what_is_read_of_it(core):
    Shy.calls = []
    tensor = torch.ones(3).as_subclass(Shy)
    core.active = True
    Shy.calls.clear()
    core.log_write(tensor, "add_", "inplace", None, core.stack())
    assert Shy.calls == []
    assert core.writes()[0][6] == (3,)
    assert core.writes()[0][1] == torch.Tensor.untyped_storage(tensor.as_subclass(torch.Tensor))._cdata


class Reentrant(torch.Tensor):
    """A subclass whose code writes and makes Nodes while its own write is being logged."""

    core = None

    @classmethod
    def __torch_function__(cls, function, kinds, args=(), kwargs=None):
        plain(cls.core, torch.exp)(torch.ones(2, requires_grad=True))
        cls.core.log_write(torch.ones(2), "add_", "inplace", None, cls.core.stack())
        gc.collect()
        return super().__torch_function__(function, kinds, args, kwargs or {})


def test_a_tensor_that_writes_while_its_write_is_logged(core):
    Reentrant.core = core
    tensor = torch.Tensor._make_subclass(Reentrant, torch.ones(3))
    core.active = True
    core.writer(torch.add, "add", "out", -1, "out")(torch.ones(3), 1, out=tensor)
    assert core.log_errors == 0
    clocks = [entry[0] for entry in core.writes()]
    assert clocks == sorted(clocks)
    assert len(set(clocks)) == len(clocks) == core.write_count > 1
    assert core.saves > 1
