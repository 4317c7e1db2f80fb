"""Contents of slots, found by reading them, as torch before 2.10 needs it, against what newer torch shows."""

from __future__ import annotations

import re
import sys

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import gradsan
from cases import each
from gradsan import _torch
from gradsan._torch import saved as module
from gradsan.graph import stale_slots

MUST_READ = not hasattr(torch._C._autograd.SavedTensor, "unpack")


@pytest.fixture
def read(monkeypatch):
    """A torch whose SavedTensor has ``register_hooks`` only."""
    monkeypatch.setattr(module, "_SHOWS_DATA", False)
    monkeypatch.setattr(module, "_UNPACKS", False)


class Three(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *parts):
        ctx.save_for_backward(*parts)
        return sum(parts)

    @staticmethod
    def backward(ctx, grad):
        return tuple(grad * one for one in ctx.saved_tensors)


def leaf(*shape: int) -> torch.Tensor:
    return torch.ones(*shape, requires_grad=True)


def of_parameter():
    weight, x = leaf(3), leaf(3)
    return weight * x, weight


def of_intermediate():
    x = leaf(3) * 2
    return x * x, x


def of_result():
    y = leaf(3).exp()
    return y.sum(), y


def of_list():
    rows, columns = torch.tensor([0, 1]), torch.tensor([1, 0])
    return leaf(2, 2)[rows, columns], columns


def of_first_in_list():
    rows, columns = torch.tensor([0, 1]), torch.tensor([1, 0])
    return leaf(2, 2)[rows, columns], rows


def of_function():
    parts = [leaf(3) * one for one in range(3)]
    return Three.apply(*parts), parts[1]


CASES = (of_parameter, of_intermediate, of_result, of_list, of_first_in_list, of_function)


def fails(root: torch.Tensor, **how) -> RuntimeError:
    with pytest.raises(RuntimeError, match="modified by an inplace operation") as caught:
        root.sum().backward(**how)
    return caught.value


def write(tensor: torch.Tensor) -> None:
    with torch.no_grad():
        tensor.add_(0 if tensor.dtype == torch.int64 else 1)


@pytest.mark.parametrize("case", CASES)
def test_the_stale_slot_is_found(read, case):
    root, tensor = case()
    write(tensor)
    error = fails(root, retain_graph=True)
    stale = stale_slots.find_stale([root.grad_fn], error.with_traceback(None))
    assert _torch.storage_identity(stale.tensor) == _torch.storage_identity(tensor)
    assert (stale.saved_version + 1, stale.version) == (tensor._version, tensor._version)
    assert stale.is_output == (case is of_result)
    # Asked a second time, and by a program that tries again.
    again = stale_slots.find_stale([root.grad_fn], error)
    assert (again.slot, again.node) == (stale.slot, stale.node)
    assert str(fails(root, retain_graph=True)) == str(error)
    write(tensor)
    assert f"is at version {tensor._version}; expected version {stale.saved_version}" in str(fails(root))


def test_of_several_stale_members_the_first_is_reported(read):
    parts = [leaf(3) * one for one in range(4)]
    root = Three.apply(*parts)
    for one in parts[1:3]:
        write(one)
    error = fails(root, retain_graph=True)
    stale = stale_slots.find_stale([root.grad_fn], error.with_traceback(None))
    assert stale.slot == "saved_tensors[1]"
    assert _torch.storage_identity(stale.tensor) == _torch.storage_identity(parts[1])
    assert str(fails(root)) == str(error)


@pytest.mark.parametrize("case", CASES)
def test_a_fresh_slot_holds_what_newer_torch_shows(read, case):
    root, _ = case()
    node = root.grad_fn
    for slot, one in _torch.saved_slots(node):
        assert not _torch.is_hooked(one)
        held = _torch.packed_object(one)
        value = _torch.read_slot(node, slot.partition("[")[0])
        value = value[int(slot.partition("[")[2][:-1])] if "[" in slot else value
        assert _torch.storage_identity(held) == _torch.storage_identity(value)
        assert held._version == value._version
        assert held.grad_fn is not node
    root.sum().backward()


def test_hooks_of_the_program_are_not_run(read):
    ran = []

    class Hooks:
        def unpack(self, packed):
            ran.append(packed)
            return packed

    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, Hooks().unpack):
        root = leaf(3).exp()
    profile = sys.getprofile()
    assert [_torch.is_hooked(one) for _, one in _torch.saved_slots(root.grad_fn)] == [True]
    calls = []
    sys.setprofile(lambda frame, event, _: calls.append(event))
    try:
        [(_, one)] = _torch.saved_slots(root.grad_fn)
        assert not torch.is_tensor(_torch.packed_object(one))
        here = sys.getprofile()
    finally:
        sys.setprofile(profile)
    assert calls
    assert here is not profile
    assert not ran
    root.sum().backward()
    assert len(ran) == 1


def test_hooks_of_gradsan_show_what_was_packed(read):
    class Packed:
        def __init__(self, tensor):
            self.tensor = tensor

    unpack = _torch.shown_when_read(lambda packed: packed.tensor)
    with torch.autograd.graph.saved_tensors_hooks(Packed, unpack):
        rows, columns = torch.tensor([0, 1]), torch.tensor([1, 0])
        root = leaf(2, 2)[rows, columns]
    held = {slot: _torch.packed_object(one) for slot, one in _torch.saved_slots(root.grad_fn)}
    assert {slot: one.tensor.tolist() for slot, one in held.items()} == {"indices[0]": [0, 1], "indices[1]": [1, 0]}
    root.sum().backward()


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *parts):
        ctx.save_for_backward(*parts)
        return parts[0] * parts[1]

    @staticmethod
    def backward(ctx, grad):
        one, other = ctx.saved_tensors
        return grad * other, grad * one


def product(one, other):
    return Product.apply(one, other)


def of_checkpoint(one, other):
    return checkpoint(torch.mul, one, other, use_reentrant=False)


def healed(one, other):
    result = product(one, other)
    one.data.zero_()
    return result


LEAVES_SAVED = [torch.mul, product, of_checkpoint, healed]


@each("mode", ["watch", "deep", "heal"])
@each("saves", LEAVES_SAVED)
@pytest.mark.filterwarnings("ignore:gradsan")
def test_leaves_keep_their_hooks(mode, saves):
    """Before 2.10 PyTorch ends those of a leaf that was read off a slot with hooks."""
    ran = []
    one, other = leaf(3), leaf(3)
    for tensor in (one, other):
        tensor.register_hook(lambda gradient: ran.append(gradient.tolist()))
    for times in range(1, 4):
        with torch.no_grad():
            one.fill_(1)
        with gradsan.watch(mode):
            root = saves(one, other)
            for _, slot in _torch.saved_slots(root.grad_fn):
                _torch.packed_object(slot)
            root.sum().backward()
        assert len(ran) == 2 * times
    if mode == "heal":
        assert ran == [[1.0] * 3] * 6


class OfSparse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, one):
        ctx.save_for_backward(one)
        return one.to_dense()

    @staticmethod
    def backward(ctx, grad):
        (one,) = ctx.saved_tensors
        return (grad + one.to_dense()).to_sparse()


@pytest.mark.filterwarnings("ignore:gradsan")
def test_a_sparse_leaf_keeps_its_hooks():
    ran = []
    one = torch.eye(2).to_sparse().requires_grad_()
    one.register_hook(ran.append)
    for times in (1, 2):
        with gradsan.watch("deep"):
            OfSparse.apply(one).sum().backward()
        assert len(ran) == times


def test_leaves_keep_their_hooks_after_a_failure(read):
    ran = []
    one, other = leaf(3), leaf(3)
    other.register_hook(ran.append)
    for saves in (torch.mul, product):
        root = saves(one, other)
        write(other)
        error = fails(root)
        assert stale_slots.find_stale([root.grad_fn], error.with_traceback(None)) is not None
        del root
        torch.mul(one, other).sum().backward()
    assert len(ran) == 2


def test_a_freed_slot_holds_nothing(read):
    root = leaf(3).exp()
    node = root.grad_fn
    root.sum().backward()
    assert [_torch.packed_object(one) for _, one in _torch.saved_slots(node)] == [None]
    assert _torch.was_freed(node)


@pytest.mark.skipif(MUST_READ, reason="this torch is read everywhere")
def test_nothing_is_read_where_torch_says_that_it_was_freed():
    root = leaf(3).exp()
    [(_, one)] = _torch.saved_slots(root.grad_fn)
    assert re.search("SavedTensor", type(one).__name__)
