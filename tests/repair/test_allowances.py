"""Statements that PyTorch refuses, carried out: values and gradients as of the accepted spelling."""

import pytest
import torch
from torch import nn

from gradsan import _torch
from gradsan.repair.trials import allowances
from gradsan.repair.trials.allowances import _Carrying, _run_once_alike


def carrying(*names):
    return _Carrying(frozenset(names))


@pytest.fixture
def x():
    return torch.arange(6.0).reshape(2, 3).requires_grad_()


def gradient_of(x, loss):
    loss.backward()
    return x.grad.tolist()


def test_one_of_several_views_is_written(x):
    with carrying("single_views"):
        whole = x * 1
        for row, factor in zip(whole.unbind(0), (2.0, 5.0), strict=True):
            row.mul_(factor)
        left, right = whole.chunk(2, 1)
        left.add_(1)
    assert isinstance(whole.unbind(0), tuple)
    assert whole.tolist() == [[1, 3, 4], [16, 21, 25]]
    assert torch.equal(torch.cat([left, right], 1), whole)
    assert gradient_of(x, whole.sum()) == [[2, 2, 2], [5, 5, 5]]


def test_a_view_made_without_autograd_is_written(x):
    with carrying("record_views"):
        whole = x * 1
        with torch.no_grad():
            part = whole[0]
            count = part.sum()
        part.mul_(3)
    assert not count.requires_grad
    assert gradient_of(x, whole.sum()) == [[3, 3, 3], [1, 1, 1]]


def test_a_part_is_written_from_an_overlapping_one(x):
    with carrying("own_sources"):
        wave, out = x.flatten()[:4] * 1, torch.arange(4.0)
        wave[1:] += wave[:-1]
        wave[2:].sub_(other=wave[1:-1])
        torch.mul(out[:-1], 2, out=out[1:])
    assert out.tolist() == [0, 0, 2, 4]
    loss = (wave * torch.tensor([1.0, 10, 100, 1000])).sum()
    assert gradient_of(x, loss) == [[-89, -990, 100], [1000, 0, 0]]


def test_an_expanded_tensor_is_written():
    w = torch.ones(3, requires_grad=True)
    with carrying("own_memory"):
        rows = w.expand(2, 3)
        rows.mul_(torch.tensor([[1.0], [4.0]]))
    assert gradient_of(w, rows.sum()) == [5, 5, 5]


def test_what_other_functions_have_expanded_is_written():
    w = torch.arange(3.0, requires_grad=True)
    with carrying("own_memory"):
        down, across = torch.meshgrid(w * 1, w * 1, indexing="ij")
        down += 1
        across *= down.detach()
        whole = w.view(1, 3)
    assert whole.data_ptr() == w.data_ptr()
    assert gradient_of(w, (down.sum() + across.sum())) == [9, 9, 9]


@pytest.mark.parametrize("is_reentrant", [True, False])
def test_a_function_is_not_run_again_by_a_backward(x, is_reentrant):
    def halves(whole):
        left, right = (whole * 1).chunk(2)
        left *= 3
        return left * right

    once = _run_once_alike(torch.utils.checkpoint.checkpoint)
    with carrying("single_views"):
        loss = once(halves, x, use_reentrant=is_reentrant).sum()
        assert gradient_of(x, loss) == [[9, 12, 15], [0, 3, 6]]


def test_what_a_checkpoint_cuts_off_is_still_cut_off(x):
    once = _run_once_alike(torch.utils.checkpoint.checkpoint)
    with pytest.warns(UserWarning, match="None of the inputs"):
        assert not once(lambda y: x * y, torch.ones(3), use_reentrant=True).requires_grad
    assert once(lambda y: x * y, torch.ones(3), use_reentrant=False).requires_grad


def test_a_leaf_is_written(x):
    with carrying("write_leaves"):
        x += 1
        x[0] = 7
        torch.add(x, 1, out=x)
    assert x.is_leaf
    assert x.tolist() == [[8, 8, 8], [5, 6, 7]]


def test_an_augmented_leaf_becomes_a_new_tensor(x):
    leaf = x
    with carrying("renew_leaves"):
        x *= 3
    assert not x.is_leaf
    assert leaf.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert gradient_of(leaf, x.sum()) == [[3, 3, 3], [3, 3, 3]]


def test_other_statements_are_still_refused(x):
    with carrying("record_views"), pytest.raises(RuntimeError, match="leaf Variable"):
        x += 1
    with carrying("write_leaves"), pytest.raises(RuntimeError, match="size"):
        x + torch.ones(4)


def test_a_backward_frees_nothing(x, monkeypatch):
    monkeypatch.setattr(torch.autograd, "backward", torch.autograd.backward)
    monkeypatch.setattr(torch.autograd, "grad", torch.autograd.grad)
    allowances.allow({"keep_graphs"})
    loss = x.exp().sum()
    loss.backward()
    loss.backward(None, False)
    first = torch.autograd.grad(loss, x)[0]
    assert torch.equal(x.grad, 2 * first)


class _Halves(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.factor = x.detach()
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        return gradient.mul_(ctx.factor)


@pytest.fixture
def functions(monkeypatch):
    """What the allowances put in the place of torch's own is taken back."""
    monkeypatch.setattr(torch.Tensor, "register_hook", torch.Tensor.register_hook)
    monkeypatch.setattr(torch.autograd.Function, "apply", torch.autograd.Function.__dict__["apply"])


def test_a_hook_changes_a_gradient_of_its_own(functions):
    allowances.allow(["own_gradients"])
    v, w = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    branch = w * 1
    branch.register_hook(lambda gradient: gradient.mul_(0.5))
    silent = v * 1
    silent.register_hook(lambda gradient: None)
    (silent + branch).sum().backward()
    assert (v.grad.tolist(), w.grad.tolist()) == ([1, 1], [0.5, 0.5])


def test_the_backward_of_a_function_changes_a_gradient_of_its_own(functions):
    allowances.allow(["own_gradients"])
    v, w = torch.ones(2, requires_grad=True), torch.full((2,), 3.0, requires_grad=True)
    (v * 1 + _Halves.apply(w * 1)).sum().backward()
    assert (v.grad.tolist(), w.grad.tolist()) == ([1, 1], [3, 3])


def test_a_function_keeps_a_copy_on_its_context(functions):
    allowances.allow(["own_context"])
    w = torch.full((2,), 3.0, requires_grad=True)
    h = w * 1
    out = _Halves.apply(h)
    h.data.zero_()
    (out * torch.tensor([2.0, 2.0])).sum().backward()
    assert w.grad.tolist() == [6, 6]


@pytest.mark.parametrize("owner", ["module", "optimizer"])
def test_gradients_are_cleared_beside_the_graph_on_them(monkeypatch, owner):
    for kind in (torch.nn.Module, torch.optim.Optimizer):
        monkeypatch.setattr(kind, "zero_grad", kind.zero_grad)
    allowances.allow(["release_gradients"])
    layer = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.ones_(layer.weight)
    layer(torch.tensor([[1.0, 2.0]])).pow(2).sum().backward(create_graph=True)
    penalty = layer.weight.grad.sum()
    cleared = layer if owner == "module" else torch.optim.SGD(layer.parameters())
    cleared.zero_grad(set_to_none=False)
    assert layer.weight.grad.tolist() == [[0, 0]]
    penalty.backward()
    # d/dw of sum(2 (w.x) x): 2 x sum(x).
    assert layer.weight.grad.tolist() == [[6, 12]]


def test_results_with_out_are_recorded_in_every_round(x):
    room = torch.empty(2, 3)
    with carrying("record_out"):
        for factor in (2.0, 5.0):
            torch.mul(x, factor, out=room)
            gradient = gradient_of(x, room.square().sum())
        most, where = torch.empty(0), torch.empty(0, dtype=torch.long)
        torch.max(x, 1, out=(most, where))
        most.sum().backward()
        torch.add(x, 1, out=x)
    assert gradient == [[0, 58, 116], [174, 232, 290]]
    assert where.tolist() == [2, 2]
    assert [row[2] for row in x.grad.tolist()] == [117, 291]
    assert x.is_leaf


def test_a_leaf_that_takes_what_a_layer_has_computed_is_still_refused(x):
    layer = torch.nn.Linear(3, 3)
    with carrying("write_leaves"), pytest.raises(RuntimeError, match="leaf Variable"):
        x[0] = layer(torch.ones(3))
    with carrying("write_leaves"):
        x.mul_(0.9).add_(0.1 * torch.ones(2, 3, requires_grad=True))
    leaf = x
    with carrying("renew_leaves"):
        x += layer(torch.ones(3))
    x.sum().backward()
    assert leaf.is_leaf
    assert layer.bias.grad.tolist() == [2, 2, 2]


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return -gradient


@pytest.fixture
def functions_restored(monkeypatch):
    owner, name = _torch.hooked_tensors()
    monkeypatch.setattr(owner, name, getattr(owner, name))
    monkeypatch.setattr(torch.autograd.Function, "apply", vars(torch.autograd.Function)["apply"])


def test_a_view_that_a_function_returned_is_written(x, functions_restored):
    with carrying("own_results"):
        doubled = x * 2
        turned = Reversed.apply(doubled)
        assert doubled.sum() == 30
        turned[0] = 0.0
        total = turned.sum()
        with pytest.raises(RuntimeError, match="was written"):
            doubled.sum()
    assert gradient_of(x, total) == [[0, 0, 0], [-2, -2, -2]]


def test_a_result_of_a_module_with_a_gradient_hook_is_written(x, functions_restored):
    given = []
    hooked = nn.Identity()
    hooked.register_full_backward_hook(lambda module, into, out: given.append(out[0].tolist()))
    with carrying("own_results"):
        total = hooked(x * 3).relu_().sum()
    assert gradient_of(x, total) == [[0, 3, 3], [3, 3, 3]]
    assert given == [[[0, 1, 1], [1, 1, 1]]]


def test_what_inference_mode_made_may_be_saved(monkeypatch):
    monkeypatch.setattr(torch, "inference_mode", torch.inference_mode)
    monkeypatch.setattr(torch.autograd, "inference_mode", torch.autograd.inference_mode)
    w = torch.ones(2, requires_grad=True)
    allowances.allow(["no_inference"])

    @torch.inference_mode
    def doubled():
        return w * 2

    with torch.inference_mode():
        tripled = w * 3
        with torch.inference_mode(mode=False):
            recorded = w * 4
    assert recorded.requires_grad
    assert not doubled().requires_grad
    assert gradient_of(w, (w * tripled * doubled()).sum()) == [6, 6]
