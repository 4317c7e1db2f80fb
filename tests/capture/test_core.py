"""A core and its saves: what pack leaves, what unpack gives back."""

import gc
import sys
import weakref

import pytest
import torch
from core_kit import constants, hooked, needs_native, value

from gradsan.capture import _core, _core_pure


def test_the_environment_can_ask_for_pure_python(monkeypatch):
    monkeypatch.setenv("GRADSAN_NATIVE", "0")
    assert not _core.make_core().is_native
    monkeypatch.delenv("GRADSAN_NATIVE")
    assert _core.make_core().is_native == _core.native_available()


def test_a_missing_c_core_is_said_only_when_asked_for(monkeypatch):
    monkeypatch.setitem(sys.modules, "gradsan.capture._native", None)
    monkeypatch.delattr("gradsan.capture._native", raising=False)
    assert not _core.native_available()
    assert not _core.make_core().is_native
    with pytest.raises(ImportError):
        _core.make_core(True)


def test_a_fresh_core(core):
    assert (core.active, core.clock, core.saves, core.write_count, core.steps) == (False, 0, 0, 0, 0)
    assert (core.open_steps, core.silent_clock, core.log_errors, core.on_stale) == (0, -1, 0, None)
    assert core.recent_saves() == core.writes() == []
    assert not core.writes_were_cut
    assert core.pack is core.pack
    assert core.unpack is core.unpack


def test_every_attribute_can_be_set(core):
    core.active = True
    core.on_stale = len
    core.pack = core.unpack = print
    for number, name in enumerate(
        ("clock", "saves", "write_count", "steps", "open_steps", "silent_clock", "log_errors"), start=2**33
    ):
        setattr(core, name, number)
        assert getattr(core, name) == number
    assert core.active is True
    assert core.on_stale is len
    assert core.pack is core.unpack is print


@needs_native
def test_the_cores_show_the_same_names():
    from gradsan.capture import _native

    for pure, native in ((_core_pure.Core, _native.Core), (_core_pure.Save, _native.Save)):
        assert {name for name in dir(pure) if name[0] != "_"} <= set(dir(native())) | {"optimizer_folder"}
    for name in ("WRITES_KEPT", "SAVES_KEPT", "STACKS_KEPT", "DEPTH_KEPT"):
        assert getattr(_native, name) == getattr(_core_pure, name)


def test_clear_forgets_the_logs_and_keeps_the_clock(core):
    core.active = True
    core.writer(torch.Tensor.mul_, "mul_", "inplace", 0, None)(torch.ones(2), 2)
    core.pack(value())
    core.silent_clock = core.clock
    clock = core.tick()
    core.clear()
    assert core.recent_saves() == core.writes() == []
    assert (core.saves, core.write_count, core.silent_clock, core.clock) == (0, 0, -1, clock)


def test_a_save_keeps_an_alias_and_no_graph(core):
    root = torch.ones(3, requires_grad=True)
    tensor = root * 2
    before = core.clock
    save = core.pack(tensor)
    assert save.tensor is not tensor
    assert save.tensor.grad_fn is None
    assert save.tensor.data_ptr() == tensor.data_ptr()
    assert (save.clock, save.version, save.was_leaf) == (before + 1, tensor._version, False)
    assert core.unpack(save) is save.tensor
    assert core.saves == 1
    kept_by_the_graph = weakref.ref(root)
    del root, tensor
    assert kept_by_the_graph() is None


@pytest.mark.parametrize("leaf", [torch.ones(3), torch.ones(3, requires_grad=True), torch.nn.Parameter(torch.ones(3))])
def test_a_leaf_is_kept_itself(core, leaf):
    save = core.pack(leaf)
    assert save.was_leaf is True
    assert save.tensor is leaf
    assert core.unpack(save) is leaf


def test_gradients_are_the_same_with_hooks(core):
    def gradients():
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2)
        )
        inputs = torch.randn(5, 4, requires_grad=True)
        output = model(inputs).exp().prod(1).sum()
        first = torch.autograd.grad(output, [inputs, *model.parameters()], create_graph=True)
        return torch.autograd.grad(sum(part.square().sum() for part in first), [inputs, *model.parameters()])

    plain = gradients()
    with hooked(core):
        watched = gradients()
    assert core.saves > 20
    for one, other in zip(plain, watched, strict=True):
        assert torch.equal(one, other)


def test_a_moved_version_is_handed_to_on_stale(core):
    seen = []
    tensor = value()
    save = core.pack(tensor)
    tensor.add_(1)
    assert core.unpack(save) is save.tensor
    core.on_stale = lambda stale: seen.append(stale) or "instead"
    assert core.unpack(save) == "instead"
    assert seen == [save]
    assert save.tensor._version == save.version + 1


def test_what_on_stale_raises_reaches_backward(core):
    def refuse(save):
        raise KeyError("refused")

    core.on_stale = refuse
    root = torch.ones(3, requires_grad=True)
    with hooked(core):
        result = root.exp()
    with torch.no_grad():
        result.mul_(2)
    with pytest.raises(KeyError, match="refused"):
        result.sum().backward()


def test_saves_up_to_the_silent_clock_are_handed_to_on_stale(core):
    core.on_stale = lambda save: save.clock
    early = core.pack(value())
    core.silent_clock = core.clock
    late = core.pack(value())
    assert core.unpack(early) == early.clock
    assert core.unpack(late) is late.tensor


def test_recent_saves_name_the_node_that_saved(core):
    root = torch.ones(3, requires_grad=True)
    with hooked(core):
        result = root.exp()
    assert [sequence for sequence, _ in core.recent_saves()] == [result.grad_fn._sequence_nr()]
    assert core.recent_saves()[0][1].codes[0] is sys._getframe().f_code


def test_recent_saves_are_bounded(core):
    tensor = torch.ones(1)
    kept = constants(core).SAVES_KEPT
    for _ in range(kept + 100):
        core.pack(tensor)
    assert core.saves == kept + 100
    assert len(core.recent_saves()) == kept


class Shy(torch.Tensor):
    """A subclass that overrides what the C core otherwise reads by descriptor, in Python code."""

    calls: list

    @classmethod
    def __torch_function__(cls, function, kinds, args=(), kwargs=None):
        cls.calls.append(getattr(function, "__name__", str(function)))
        return super().__torch_function__(function, kinds, args, kwargs or {})


def test_a_subclass_is_asked_itself(core):
    Shy.calls = []
    tensor = value().as_subclass(Shy)
    Shy.calls.clear()
    save = core.pack(tensor)
    assert type(save.tensor) is Shy
    assert Shy.calls == ["__get__", "detach", "__get__"]
    core.active = True
    core.log_write(tensor, "add_", "inplace", None, core.stack())
    assert "untyped_storage" in Shy.calls
    assert core.writes()[0][6] == (3,)


class Reentrant(torch.Tensor):
    """A subclass whose code saves and writes while it is being saved."""

    core = None

    @classmethod
    def __torch_function__(cls, function, kinds, args=(), kwargs=None):
        cls.core.pack(torch.ones(2))
        cls.core.log_write(torch.ones(2), "add_", "inplace", None, cls.core.stack())
        gc.collect()
        return super().__torch_function__(function, kinds, args, kwargs or {})


def test_a_tensor_that_saves_while_it_is_saved(core):
    Reentrant.core = core
    tensor = torch.Tensor._make_subclass(Reentrant, torch.ones(3))
    core.active = True
    core.pack(tensor)
    core.writer(torch.add, "add", "out", -1, "out")(torch.ones(3), 1, out=tensor)
    assert core.log_errors == 0
    clocks = [entry[0] for entry in core.writes()]
    assert clocks == sorted(clocks)
    assert len(set(clocks)) == len(clocks) == core.write_count


def test_an_inference_tensor_raises_as_torch_does(core):
    with torch.inference_mode():
        tensor = torch.ones(3)
    with pytest.raises(RuntimeError, match="version counter"):
        core.pack(tensor)
    assert core.saves == 0
