"""Stopping where a value is overwritten that a live graph holds, before any backward asks for it."""

import copy

import pytest
import torch
from torch import nn

import gradsan
from cases import each
from gradsan.record.recorder import recorder

WAYS = {
    "inplace": lambda t: t.detach().mul_(2),
    "augmented": lambda t: t.detach().__imul__(2),
    "setitem": lambda t: t.detach().__setitem__(1, 5.0),
    "out": lambda t: torch.add(torch.ones(3), 1, out=t.detach()),
    "foreach": lambda t: torch._foreach_add_([torch.ones(2), t.detach()], 1.0),
    "operator": lambda t: torch.ops.aten.add_(t.detach(), 1),
    "data": lambda t: t.data.mul_(2),
    "storage": lambda t: t.untyped_storage().fill_(0),
    "map": lambda t: t.detach().map_(torch.ones(3), lambda one, other: one + other),
    "copy": lambda t: copy.copy(t.detach()).zero_(),
    "init": lambda t: nn.init.zeros_(t.detach()),
}
SILENT = {"data", "storage", "map", "copy"}


@pytest.mark.parametrize("native", [True, False])
@each("way", WAYS)
def test_the_program_is_stopped_at_the_write(way, native):
    reached = []

    def train():
        x = torch.ones(3, requires_grad=True)
        y = x.exp()
        loss = y.sum()
        reached.append("saved")
        WAYS[way](y)
        reached.append("written")
        loss.backward()

    watched = gradsan.watch(early=True, native=native)
    with pytest.raises(gradsan.HaltError), watched:
        train()
    assert reached == ["saved"]
    [found] = watched.diagnoses
    assert found.silent == (way in SILENT)
    assert [label.role for label in found.labels] == ["saved", "written"]
    assert found.notes[-1].key == "note.found_at_write"
    assert {event.kind for event in found.events} == {"saved", "written"}
    assert found.gradient.status == "unknown"
    assert found.tensor.name == "t"
    assert (found.tensor.op, found.tensor.operand) == ("ExpBackward0", "result")


def test_memory_written_from_outside_is_seen_at_the_backward():
    def train():
        x = torch.ones(3, requires_grad=True)
        y = x.exp()
        loss = y.sum()
        y.detach().numpy()[:] = 0
        loss.backward()

    watched = gradsan.watch(early=True)
    with pytest.raises(gradsan.HaltError), watched:
        train()
    [found] = watched.diagnoses
    assert [label.role for label in found.labels][-1] == "used"


@pytest.mark.parametrize("foreach", [True, False])
def test_a_step_over_a_graph_that_lives(foreach):
    parameter = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter], lr=0.1, foreach=foreach)

    def train():
        for _ in range(2):
            loss = (parameter * parameter).sum()
            loss.backward(retain_graph=True)
            optimizer.step()

    watched = gradsan.watch(early=True)
    with pytest.raises(gradsan.HaltError), watched:
        train()
    [found] = watched.diagnoses
    assert found.code == "GS110"
    assert parameter.tolist() != [1.0] * 3


def test_graphs_that_have_run_or_died_hold_nothing():
    parameter = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.Adam([parameter], lr=0.1)
    losses = []
    with gradsan.watch(early=True) as watched:
        for _ in range(3):
            optimizer.zero_grad()
            losses.append((parameter * parameter).exp().sum())
            losses[-1].backward()
            optimizer.step()
        y = parameter.exp()
        del y
        with torch.no_grad():
            parameter.zero_()
    assert watched.diagnoses == ()


def test_other_elements_and_the_same_bytes_are_no_overwriting():
    with gradsan.watch(early=True) as watched:
        base = torch.ones(4, requires_grad=True) * 1
        loss = base[:2].exp().sum() + (base[:2] * base[:2]).sum()
        with torch.no_grad():
            base[2:].mul_(5)
            base[:2].add_(0)
        del loss
    assert watched.diagnoses == ()


def test_operations_that_save_what_they_write():
    with gradsan.watch(early=True) as watched:
        x = torch.ones(4, requires_grad=True)
        loss = (x * 2).relu_().sum() + nn.functional.leaky_relu_(x * 2).sum() + (x * 2).sigmoid_().sum()
        norm = nn.BatchNorm1d(2)
        first = norm(torch.randn(3, 2, requires_grad=True)).sum()
        second = norm(torch.randn(3, 2, requires_grad=True)).sum()
        norm.running_mean.data.add_(0.5)
        (loss + first + second).backward()
    assert watched.diagnoses == ()


def test_statistics_that_training_does_not_read_are_counted_all_the_same():
    norm = nn.BatchNorm1d(2)
    with gradsan.watch(early=True) as watched:
        loss = norm(torch.randn(3, 2, requires_grad=True)).sum()
        with pytest.raises(gradsan.HaltError):
            norm.running_mean.add_(0.5)
    del loss
    assert [one.code for one in watched.diagnoses] == ["GS112"]


def test_healed_writes_do_not_stop_the_program():
    with gradsan.watch("heal", early=True) as watched:
        x = torch.ones(3, requires_grad=True)
        y = x.exp()
        y.detach().zero_()
        y.sum().backward()
    assert torch.equal(x.grad, torch.ones(3).exp())
    assert [one.severity for one in watched.diagnoses] == ["warning"]
    y = None
    with gradsan.watch("heal", early=True, only="GS999"):
        y = x.exp()
        with pytest.raises(gradsan.HaltError):
            y.detach().zero_()


def test_a_graph_that_only_an_object_holds():
    class Holder:
        pass

    holder = Holder()
    with gradsan.watch(early=True) as watched:
        x = torch.ones(3, requires_grad=True)
        y = x * 2
        holder.losses = {"one": [(y * y).sum()]}
        with pytest.raises(gradsan.HaltError):
            y.detach().zero_()
    assert [one.code for one in watched.diagnoses] == ["GS102"]


def test_early_chooses_deep_mode_and_leaves_nothing():
    with gradsan.watch(early=True) as watched:
        assert recorder().core.tells_all_writes
        assert watched.report.mode == "deep"
    assert not recorder().core.tells_all_writes
    assert recorder().watching.deep.holdings is None


def test_a_step_over_a_kept_graph_is_reported_without_a_backward_that_may_never_come():
    def train():
        net = torch.nn.Linear(3, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        loss = net(torch.ones(2, 3, requires_grad=True)).sum()
        loss.backward(retain_graph=True)
        optimizer.step()

    watched = gradsan.watch(early=True)
    with pytest.raises(gradsan.HaltError), watched:
        train()
    [found] = watched.diagnoses
    assert found.code == "GS110"
    assert (found.title.key, found.explanation.key) == (
        "title.step_over_live_graph",
        "explanation.step_over_live_graph",
    )
