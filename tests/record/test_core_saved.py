"""Saved tensors that the C core keeps without the hooks in Python: which, with what fields, how handed out."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import torch

import gradsan
from cases import each
from gradsan.originals.comparing import saved_values
from gradsan.originals.originals import Kept
from gradsan.record import log
from gradsan.record.recorder import recorder

pytestmark = pytest.mark.skipif(not log.has_native_core(), reason="the C core was not built")

FIELDS = ("was_leaf", "requires_grad", "maker", "output", "version", "is_copied", "hooks", "parts", "reported", "heals")


def leaf(*sizes):
    return torch.rand(*sizes, requires_grad=True)


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = x * x
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx, gradient):
        x, _ = ctx.saved_tensors
        return 2 * x * gradient


def in_place():
    x = leaf(4) * 1
    return x.exp_()


def in_place_on_a_view():
    x = leaf(4, 4) * 1
    x[1].exp_()
    return x.sin()


KEPT_IN_C = {
    "a leaf": lambda: leaf(3).sin(),
    "a parameter": lambda: torch.nn.functional.linear(torch.rand(2, 3), torch.nn.Parameter(torch.rand(4, 3))),
    "a result": lambda: leaf(3).exp(),
    "an input": lambda: (leaf(3) * 1).sin(),
    "a result in place": in_place,
    "views": lambda: leaf(4, 4)[1:, ::2].t().sin(),
    "expanded": lambda: leaf(1, 4).expand(3, 4) * leaf(3, 4),
    "several": lambda: torch.lerp(leaf(3), leaf(3), leaf(3)),
    "indices": lambda: leaf(4)[torch.tensor([0, 2])],
    "a mask": lambda: leaf(4).masked_fill(torch.rand(4) > 0.5, 0),
    "half": lambda: torch.rand(3, dtype=torch.bfloat16, requires_grad=True).sin(),
    "of one element": lambda: torch.rand((), requires_grad=True).sin(),
}
LEFT_TO_PYTHON = {
    "of NumPy": lambda: leaf(3) * torch.from_numpy(np.ones(3, dtype=np.float32)),
    "shared memory": lambda: leaf(3) * torch.rand(3).share_memory_(),
    "complex": lambda: torch.rand(3, dtype=torch.complex64, requires_grad=True).sin(),
    "negated": lambda: leaf(3) * torch.rand(3, dtype=torch.complex64).conj().imag,
    "empty": lambda: leaf(0).sin(),
    "sparse": lambda: torch.sparse.mm(torch.eye(3).to_sparse(), leaf(3, 2)),
    "a subclass": lambda: leaf(3) * torch.rand(3).as_subclass(type("Own", (torch.Tensor,), {})),
    "of a Function": lambda: Squared.apply(leaf(3)).sin(),
    "after a write to a view": in_place_on_a_view,
}


def packed_by(program):
    """What each save of a program became, the same by the hook in Python, and whether Python was asked."""
    core = log.make_core(True)
    core.active = True
    found, asked = [], []
    values = saved_values(core, lambda tensor: asked.append(tensor), lambda kept: None, (), ())

    def pack(tensor):
        asked.clear()
        kept = values.pack(tensor)
        found.append((kept, Kept(tensor, False, 0, None, 0), bool(asked), tensor))
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed):
        result = program()
    return found, values, result


@each("name", [*KEPT_IN_C])
def test_fields_are_those_that_python_gives(name):
    found, values, _result = packed_by(KEPT_IN_C[name])
    assert found
    assert values.live() == [kept for kept, *_ in found]
    for kept, same, is_asked, tensor in found:
        assert not is_asked
        assert type(kept) is Kept
        assert [getattr(kept, field) for field in FIELDS] == [getattr(same, field) for field in FIELDS]
        assert (kept.source is None) == (same.source is None)
        assert kept.source is None or (kept.source() is tensor and type(kept.source) is type(same.source))
        assert kept._leaf is same._leaf
        assert kept.alias.stride() == same.alias.stride()
        assert torch.equal(kept.alias, tensor)
        assert kept.alias._version == kept.version
        assert kept.is_as_saved
        assert not kept.changed
        assert kept.stack.codes


@each("name", [*LEFT_TO_PYTHON])
def test_python_is_asked_for_what_is_not_ordinary(name):
    found, values, _result = packed_by(LEFT_TO_PYTHON[name])
    assert any(is_asked for *_, is_asked, _ in found)
    assert values.count == sum(not is_asked for *_, is_asked, _ in found)


def test_python_is_asked_for_a_storage_that_is_left_alone_and_while_the_hooks_are_off():
    core = log.make_core(True)
    core.active = True
    known, asked = {}, []
    values = saved_values(core, asked.append, None, (known,), ())
    x = torch.ones(3)
    assert isinstance(values.pack(x), Kept)
    known[x.untyped_storage()._cdata] = None
    values.pack(x)
    assert len(asked) == 1
    values.pack(torch.ones(3))
    assert len(asked) == 1
    for switch in (lambda: setattr(values, "is_off", True), lambda: setattr(core, "active", False)):
        switch()
        values.pack(torch.ones(3))
        values.is_off = False
    assert len(asked) == 3


def test_a_listener_is_called_for_each_value_and_may_raise():
    core = log.make_core(True)
    core.active = True
    values, heard = saved_values(core, None, None, (), ()), []
    values.on_kept = heard.append
    kept = values.pack(torch.ones(3))
    assert heard == [kept]
    values.on_kept = lambda kept: 1 / 0
    with pytest.raises(ZeroDivisionError):
        values.pack(torch.ones(3))
    del heard[:]


def test_doubtful_are_those_whose_bytes_may_have_changed():
    core = log.make_core(True)
    core.active = True
    values = saved_values(core, None, None, (), ())
    tensors = [torch.ones(2, 3) for _ in range(5)]
    kept = [values.pack(one[0]) for one in tensors]
    tensors[1].data[1, 0] = 5  # another row of its storage
    tensors[2].data[0, 2] = 5
    tensors[3].add_(1)
    rows = tensors[4].data
    rows.mul_(1)  # the same numbers
    assert values.doubtful() == [kept[2], kept[3]]
    del kept[3]
    assert values.count == 4


@each("write", [lambda x: None, lambda x: x.data.mul_(2), lambda x: x.data.__setitem__(0, 9.0), lambda x: x.mul_(2)])
def test_backward_gets_what_it_gets_without_gradsan(write):
    """As deep mode hands out: silently wrong where PyTorch is, and its error where it raises."""

    def gradient():
        weight = torch.arange(1.0, 13.0).view(3, 4).requires_grad_()
        factor = torch.arange(12.0).view(3, 4).t().contiguous().t()
        loss = (weight * factor[:, 1:2]).sum() + weight[1].exp().sum()
        write(factor)
        loss.backward()
        return weight.grad.tolist()

    try:
        plain = gradient()
    except RuntimeError as error:
        with gradsan.watch("deep", native=True), pytest.raises(RuntimeError, match=str(error)[:60]):
            gradient()
        return
    with gradsan.watch("deep", native=True) as watched:
        assert gradient() == plain
    assert bool(watched.report.diagnoses) == (plain != _unwritten(gradient, write))


def _unwritten(gradient, write):
    cells = dict(zip(gradient.__code__.co_freevars, gradient.__closure__, strict=True))
    cells["write"].cell_contents = lambda x: None
    try:
        return gradient()
    finally:
        cells["write"].cell_contents = write


def test_nothing_is_left_of_values_after_their_graph():
    with gradsan.watch("deep", native=True):
        values = recorder().watching.deep._values
        gc.collect()
        before = values.count
        x = leaf(3)
        y = x.exp().sin()
        assert values.count == before + 2
        gone = weakref.ref(values.live()[-1])
        y.sum().backward()
        del y
        assert values.count == before
        assert gone() is None
