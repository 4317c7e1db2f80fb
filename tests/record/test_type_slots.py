"""Types have the C slots that they had: while watching but for what is replaced, afterwards all, on both cores."""

from __future__ import annotations

import operator
import threading
from typing import Any

import pytest
import slots_kit
import torch

import core_kit
import gradsan
from gradsan.record.recorder import recorder

pytestmark = pytest.mark.skipif(not slots_kit.is_cpython(), reason="reads types where CPython keeps them")
REPLACED = {"__setitem__": "mp_ass_subscript", "__getitem__": "mp_subscript", "__call__": "tp_call"}


@pytest.mark.parametrize("native", core_kit.CORES)
@pytest.mark.parametrize("mode", ["watch", "deep", "heal"])
def test_no_slot_changes_but_those_of_what_is_replaced(native: bool, mode: Any) -> None:
    class Before(torch.Tensor):
        pass

    class Indexed(torch.Tensor):
        def __getitem__(self, key: Any) -> Any:
            return super().__getitem__(key)

        def __setitem__(self, key: Any, value: Any) -> None:
            super().__setitem__(key, value)

    watcher = gradsan.watch(mode, native=native)
    with watcher:  # once, to know which types are touched, and to import what is imported on the way
        this = recorder()
        kinds = slots_kit.touched_types(this.patches) + slots_kit.touched_types(this.watching._deep_patches)
    assert {torch.Tensor, Before} < set(kinds)
    assert len(kinds) > 20
    before = slots_kit.all_slots(kinds)
    with watcher:
        during = slots_kit.changed(before, slots_kit.all_slots(kinds))

        class Meanwhile(torch.Tensor):
            pass

        assert Before(torch.ones(2))[0] == Indexed(torch.ones(2))[1] == Meanwhile(torch.ones(2))[1] == 1
    assert slots_kit.changed(before, slots_kit.all_slots(kinds)) == set()
    assert {slot for _, slot in during} <= set(REPLACED.values())
    assert not [name for name, _ in during if name == "Indexed"]
    now, plain = slots_kit.slots_of(Meanwhile), slots_kit.slots_of(Before)
    assert {name for name in plain if name[:3] in ("sq_", "mp_", "nb_") and now[name] != plain[name]} == set()


@pytest.mark.parametrize("native", core_kit.CORES)
def test_a_tensor_is_no_sequence(native: bool) -> None:
    def check() -> None:
        for scalar in (torch.tensor(1.0), torch.nn.Parameter(torch.tensor(1.0)), torch.tensor(1.0).as_subclass(Own)):
            for made in (torch.tensor([scalar]), torch.as_tensor([[scalar]]), torch.ones(1).new_tensor([scalar])):
                assert made.sum() == 1
        with pytest.raises(TypeError):
            operator.indexOf(torch.tensor(1.0), 1)

    class Own(torch.Tensor):
        pass

    with gradsan.watch(native=native):

        class Own(torch.Tensor):
            pass

        check()
    check()


@pytest.mark.parametrize("native", core_kit.CORES)
def test_indexing_stays_what_it_is(native: bool) -> None:
    original = torch.Tensor.__getitem__
    with gradsan.watch(native=native):
        assert torch.Tensor.__getitem__ is original
        with pytest.raises(IndexError, match="index 7 is out of bounds"):
            torch.ones(3)[7]

        class Own(torch.Tensor):
            pass

        rows = Own(torch.ones(2, 2))
        rows[0] = 3
        assert type(rows[0]) is Own
        assert rows.tolist() == [[3, 3], [1, 1]]


@core_kit.needs_native
def test_the_native_core_logs_what_indexing_saves() -> None:
    with gradsan.watch(native=True):
        x = torch.ones(3, requires_grad=True).exp()
        picked = x[torch.tensor([0, 1])]
    core = recorder().core
    (made,) = core.nodes_near(picked.grad_fn._sequence_nr(), threading.get_ident())
    assert made[0] <= picked.grad_fn._sequence_nr() < made[1]


@pytest.mark.parametrize("native", core_kit.CORES)
def test_slots_set_by_the_program_meanwhile_stay(native: bool) -> None:
    class Own(torch.Tensor):
        pass

    with gradsan.watch(native=native):
        Own.__getitem__ = lambda self, key: "own"  # type: ignore[assignment]
        assert Own(torch.ones(2))[0] == "own"
    assert Own(torch.ones(2))[0] == "own"
    del Own.__getitem__
    assert Own(torch.ones(2))[0] == 1
