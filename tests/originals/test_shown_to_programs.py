"""Saved tensors, attributes and checkpoints as the program reads them: the same as without gradsan."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop
from torch.utils.hooks import RemovableHandle

import core_kit
import gradsan


@pytest.mark.parametrize("native", core_kit.CORES)
@pytest.mark.parametrize("mode", ["watch", "deep"])
def test_a_saved_tensor_shows_what_the_programs_hooks_gave(mode: Any, native: bool) -> None:
    def pack(tensor: Any) -> Any:
        return [tensor]

    def unpack(packed: Any) -> Any:
        return packed[0]

    x = torch.ones(2, requires_grad=True)
    with gradsan.watch(mode, native=native):
        with saved_tensors_hooks(pack, unpack):
            y = x**2
        saved = y.grad_fn._raw_saved_self
        if hasattr(saved, "data"):
            assert saved.data[0] is x
            assert saved.unpack_hook is unpack
            middle = x.exp()
            square = middle**2  # its Node holds the slot
            result, given = middle.grad_fn._raw_saved_result, square.grad_fn._raw_saved_self
            assert result.unpack_hook is given.unpack_hook is None
            assert given.data is middle
            assert not result.data.requires_grad
            assert torch.equal(result.data, middle)
            given.register_hooks(pack, unpack)
            assert given.unpack_hook is unpack
            assert given.data[0] is not middle
    y.sum().backward()
    assert x.grad.tolist() == [2, 2]


@pytest.mark.parametrize("native", core_kit.CORES)
def test_deleting_data_raises_as_ever(native: bool) -> None:
    def deleted() -> str:
        with pytest.raises(RuntimeError) as raised:
            del torch.ones(1).data
        return str(raised.value)

    plain = deleted()
    with gradsan.watch(native=native):
        assert deleted() == plain


@pytest.mark.parametrize("native", core_kit.CORES)
def test_a_recomputation_that_stops_while_it_saves_inputs_keeps_nothing(native: bool) -> None:
    def gradient(function: Any, x: Any) -> Any:
        with torch.enable_grad():
            return torch.autograd.grad(function(x).sum(), x, create_graph=True)[0]

    def again(function: Any) -> Any:
        return lambda x: checkpoint(function, x, use_reentrant=False)

    def inner(x: Any) -> Any:
        return again(lambda y: y.cos().sin().exp())(again(lambda y: y.sin().exp().sin())(x))

    with gradsan.watch(native=native), set_checkpoint_early_stop(True):
        leaf = torch.ones(3, requires_grad=True)
        gradient(lambda x: gradient(again(inner), x), leaf)
        alive = weakref.ref(leaf)
        del leaf
        gc.collect()
        assert alive() is None


def converted_between_rounds() -> Any:
    """Parameters of three optimizers are swapped, one after rounds in which much is noted of them; then trained on."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 1))
    model.extra = torch.nn.Parameter(torch.ones(2))
    x = torch.randn(4, 2)
    for _ in range(4):
        optimizers = [torch.optim.Adam(model.parameters()), torch.optim.SGD([model.extra], 0.1)]
        for _ in range(4):
            model.zero_grad()
            loss = checkpoint(model, x * model.extra, use_reentrant=False).square().mean()
            (gradient,) = torch.autograd.grad(loss, model.extra, create_graph=True)
            (loss + gradient.square().sum()).backward()
            model.extra.data.mul_(0.9)
            state = model.state_dict(keep_vars=True)
            for optimizer in optimizers:
                optimizer.step()
        model.zero_grad()
        del loss, gradient
        twin = copy.deepcopy(model)
        twin.load_state_dict(state, assign=True)
        for optimizer in optimizers:
            optimizer.step()
        twin(x)
        del twin, state
        model.double() if x.dtype is torch.float32 else model.float()
        x = x.to(model.extra.dtype)
        model.load_state_dict({name: value * 1 for name, value in model.state_dict().items()})
    return torch.cat([one.detach().flatten().double() for one in model.parameters()])


@pytest.mark.parametrize("native", core_kit.CORES)
@pytest.mark.parametrize("mode", ["watch", "deep", "nonfinite"])
def test_the_program_may_swap_what_gradsan_looks_at(mode: Any, native: bool) -> None:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        plain = converted_between_rounds()
        with gradsan.watch(mode, native=native):
            assert torch.equal(converted_between_rounds(), plain)
            one, other = torch.ones(1), torch.zeros(1)
            held = weakref.ref(one)
            with pytest.raises(RuntimeError, match="weakref associated"):
                torch.utils.swap_tensors(one, other)
            assert held() is one
        assert torch.utils.weakref is weakref
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def test_handles_of_the_program_have_the_numbers_that_they_have_without() -> None:
    before = RemovableHandle.next_id
    for mode in ("watch", "deep", "nonfinite"):
        with gradsan.watch(mode):
            model = torch.nn.Linear(2, 2)
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            handle = register_optimizer_step_pre_hook(lambda *_: None)
            handle.remove()
            assert handle.id == before
            before += 1
    assert RemovableHandle.next_id == before
