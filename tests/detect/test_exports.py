"""Exported memory: compared in the first rounds of the line that hands it out, and after powers of two of them."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.dlpack

import gradsan
from gradsan._torch import bytes_of, own_bytes
from gradsan._watching import watching_of
from gradsan.detect.exports import Schedule
from gradsan.record.recorder import recorder


def train(first: int, rounds: int, mode: str = "watch") -> list[str]:
    """Refill a batch of NumPy's between forward and backward from round ``first`` on; returns the codes found."""
    batch, weight = np.ones(4, np.float32), torch.ones(4, requires_grad=True)
    with gradsan.watch(mode) as watch:
        for number in range(rounds):
            loss = (weight * torch.from_numpy(batch)).sum()
            if number >= first:
                batch += 1
            loss.backward()
            weight.grad = None
    return [one.code for one in watch.diagnoses]


@pytest.mark.parametrize(("first", "rounds"), [(0, 3), (10, 20), (70, 140)])
def test_a_fault_of_every_round_is_found_though_it_begins_late(first: int, rounds: int) -> None:
    assert train(first, rounds) == ["GS203"]


def test_a_phase_with_a_backward_of_its_own_is_compared_from_its_beginning() -> None:
    batch, weight = np.ones(4, np.float32), torch.ones(4, requires_grad=True)
    recorder().core.clear()
    with gradsan.watch() as watch:
        data = torch.from_numpy(batch)
        for _ in range(40):
            (weight * data).sum().backward()
        for _ in range(4):
            loss = (weight * data).sum()
            batch += 1
            loss.backward()
    assert [one.code for one in watch.diagnoses] == ["GS203"]


@pytest.mark.parametrize("module", [torch, torch.utils.dlpack])
def test_an_array_that_comes_in_by_dlpack_is_watched_under_its_name(module: Any) -> None:
    batch, weight = np.ones(4, np.float32), torch.ones(4, requires_grad=True)
    with gradsan.watch() as watch:
        loss = (weight * module.from_dlpack(batch)).sum()
        batch += 1
        loss.backward()
        loss = (weight * module.from_dlpack(batch.copy())).sum()
        loss.backward()
    assert [(one.code, one.tensor and one.tensor.name) for one in watch.diagnoses] == [("GS203", "batch")]


def test_between_them_deep_mode_alone_sees_a_fault() -> None:
    assert train(40, 60) == []
    assert train(40, 60, "deep") == ["GS203"]


def test_a_data_set_of_the_whole_program_is_not_looked_at_in_every_round() -> None:
    held, weight = np.ones((8, 4), np.float32), torch.ones(4, requires_grad=True)
    compared = []
    recorder().core.clear()
    with gradsan.watch():
        data = torch.from_numpy(held)
        for number in range(70):
            if watching_of(recorder()).exports.any:
                compared.append(number)
            (data * weight).sum().backward()
    assert compared == [*range(20), *range(32, 36), *range(64, 68)]


@pytest.mark.parametrize("calls", [1, 20])
def test_rounds_of_a_line_begin_where_it_is_called_after_a_backward(calls: int) -> None:
    schedule = Schedule()
    due = []
    for number in range(40):
        for _ in range(calls):
            schedule.call(number)
        due.append(schedule.is_due(number))
    assert [number for number, one in enumerate(due) if not one] == [*range(20, 32), *range(36, 40)]


@pytest.mark.parametrize(
    "view",
    [
        torch.arange(8.0)[::2],
        torch.arange(8.0)[::2][:1],
        torch.arange(64.0).reshape(8, 8)[:1, ::3][:, 1:2],
        torch.arange(12.0).reshape(3, 4).t(),
        torch.ones(2, 0)[:, ::2],
        torch.tensor(3.0),
        torch.ones(4, dtype=torch.cfloat).mul(1 + 2j).conj(),
        torch.ones(4, dtype=torch.cfloat).mul(1 + 2j).conj().imag,
        torch.ones(3, requires_grad=True)[::2],
    ],
)
def test_bytes_of_any_view_are_those_of_its_memory(view: torch.Tensor) -> None:
    copy = bytes_of(view)
    assert len(copy) == view.numel() * view.element_size()
    assert torch.equal(own_bytes(view), copy)
    if copy.numel():
        view.untyped_storage()[view.storage_offset() * view.element_size()] += 1
        assert not torch.equal(own_bytes(view), copy)


def test_two_arrays_that_one_line_hands_out_are_one_finding_whose_change_copies_both() -> None:
    held, marks = np.ones((2, 3), np.float32), np.zeros(2, np.int64)
    model = torch.nn.Linear(3, 2)

    def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
        held[:], marks[:] = number + 1, number % 2
        return torch.from_numpy(held), torch.from_numpy(marks)

    with gradsan.watch() as watch:
        loss = torch.zeros(())
        for number in range(2):
            inputs, labels = batch(number)
            loss = loss + torch.nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
    (found,) = watch.diagnoses
    first, second = found.fixes
    assert first.lines[0][2].strip() == "return torch.from_numpy(held).clone(), torch.from_numpy(marks).clone()"
    assert "cross_entropy(model(inputs.clone()), labels.clone())" in second.lines[0][2]


def test_an_array_shared_once_and_filled_in_a_loop_is_copied_where_it_is_read() -> None:
    class Camera:
        def __init__(self) -> None:
            self.pixels = np.zeros((2, 3), np.float32)
            self.frame = torch.from_numpy(self.pixels)

    model = torch.nn.Linear(3, 2)
    with gradsan.watch() as watch:
        camera, loss = Camera(), torch.zeros(())
        for number in range(2):
            camera.pixels += number + 1
            loss = loss + model(camera.frame).square().sum()
        loss.backward()
    (found,) = watch.diagnoses
    first, second = found.fixes
    assert "model(camera.frame.clone())" in first.lines[0][2]
    assert "torch.from_numpy(self.pixels).clone()" in second.lines[0][2]


def test_no_copy_is_advised_for_a_weight_that_an_array_is_to_bound() -> None:
    model = torch.nn.Linear(3, 2)
    with gradsan.watch() as watch:
        weight = model.weight.detach().numpy()
        for _ in range(2):
            loss = model(torch.ones(1, 3, requires_grad=True)).sum()
            np.clip(weight * 0.5, -0.1, 0.1, out=weight)
            loss.backward()
    found = next(one for one in watch.diagnoses if one.code == "GS203")
    assert [fix.kind for fix in found.fixes] == ["reorder_update"]
