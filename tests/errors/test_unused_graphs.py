"""Containers that keep a graph of every round: named where no backward uses them, and only there."""

from collections import deque
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import gradsan
from cases import each
from gradsan.detect.graphs.unused_graphs import UnusedGraphs
from gradsan.record.recorder import Recorder

ROUNDS, BATCH, WIDTH = 300, 32, 64


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))


def losses_of(model, kept, rounds=ROUNDS):
    for _ in range(rounds):
        kept.append(model(torch.randn(BATCH, 8)).pow(2).mean())
    return kept


def grown(watch):
    return [one for one in watch.diagnoses if one.code == "GS422"]


def test_graphs_kept_by_an_evaluation_are_named_with_their_bytes():
    with gradsan.watch() as watch:
        losses = losses_of(net(), [])
    assert len(losses) == ROUNDS
    (found,) = grown(watch)
    assert found.severity == "warning"
    assert found.title.values["name"] in ("kept", "losses")
    # Each round keeps its input, the result of tanh (for itself and for the layer behind it), and what pow has saved.
    floats = BATCH * (8 + WIDTH + 1)
    told = found.labels[0].message.values["bytes"]
    assert 4 * floats <= told <= 4 * floats + 6_000
    assert f"about {told / 1024:.0f} KB more" in str(found.labels[0].message)


class Keeper:
    def __init__(self):
        self.history = []

    def keep(self, out):
        self.history.append(out.square().mean())


def test_the_line_of_a_method_that_keeps_them_is_mended():
    keeper, model = Keeper(), net()
    with gradsan.watch() as watch:
        for _ in range(ROUNDS):
            keeper.keep(model(torch.randn(BATCH, 8)))
    (found,) = grown(watch)
    assert found.title.values["name"] == "keeper.history"
    assert [fix.lines[0][2].strip() for fix in found.fixes if fix.lines] == [
        "self.history.append(out.square().mean().detach())"
    ]


def test_it_is_found_after_a_training_that_made_as_many_nodes_in_each_step():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with gradsan.watch() as watch:
        for _ in range(3):
            optimizer.zero_grad()
            sum(losses_of(model, [], 200)).backward()
            optimizer.step()
        assert len(losses_of(model, [], 2_000)) == 2_000
    assert len(grown(watch)) == 1


def test_it_is_reported_though_training_goes_on_afterwards():
    model = net()
    with gradsan.watch() as watch:
        losses = losses_of(model, [])
        model(torch.randn(BATCH, 8)).sum().backward()
    assert len(losses) == ROUNDS
    assert len(grown(watch)) == 1


def keep_window(model):
    losses_of(model, deque(maxlen=20))


def keep_values(model):
    losses_of(model, Values())


def use_all(model):
    torch.stack(losses_of(model, [])).mean().backward()


def use_state_of_each_step(model):
    cell, state, states = nn.RNNCell(8, 8), torch.zeros(4, 8), []
    for _ in range(ROUNDS):
        state = cell(torch.randn(4, 8), state)
        states.append(state)
    torch.stack(states).sum().backward()


def keep_nothing_under_no_grad(model):
    with torch.no_grad():
        losses_of(model, [])


def differentiate_through_inner_steps(model):
    weight, x = model[0].weight, torch.randn(BATCH, 8)
    for _ in range(40):
        (gradient,) = torch.autograd.grad((x @ weight.t()).tanh().pow(2).mean(), weight, create_graph=True)
        weight = weight - 0.1 * gradient
    (x @ weight.t()).pow(2).mean().backward()


class Values(list):
    def append(self, loss):
        super().append(loss.item())


@each(
    "program",
    [
        keep_window,
        keep_values,
        use_all,
        use_state_of_each_step,
        keep_nothing_under_no_grad,
        differentiate_through_inner_steps,
    ],
)
def test_bounded_or_used_graphs_are_no_finding(program):
    with gradsan.watch() as watch:
        program(net())
    assert watch.diagnoses == ()


def test_a_state_that_the_line_itself_runs_through_again_and_again_is_named():
    cell, state = nn.RNNCell(8, 8), torch.zeros(4, 8)
    with gradsan.watch() as watch:
        for _ in range(40):
            state = cell(torch.randn(4, 8), state)
            torch.autograd.grad(state.sum(), list(cell.parameters()), retain_graph=True)
    assert len(grown(watch)) == 1


@pytest.mark.parametrize("native", [True, False])
def test_both_cores_report_nodes_since_the_last_backward(native):
    recorder = Recorder(native=native)
    told = []
    recorder.core.on_quiet = told.append
    stretch = recorder.start()
    try:
        recorder.core.quiet_nodes = 10
        weight = torch.ones(3, requires_grad=True)
        weight.mul(1.0).sum().backward()
        assert told == []
        first = recorder.core.quiet_from
        assert first == recorder.core.backward_end
        for _ in range(12):
            weight = weight.mul(1.0)
    finally:
        recorder.stop(stretch)
    assert [one - first for one in told] == [10, 11, 12]


def test_looks_become_rarer():
    class Core:
        running, backwards, quiet_from, quiet_nodes = (), 0, 0, 1024

    core = Core()
    unused = UnusedGraphs(SimpleNamespace(core=core, report=pytest.fail, listeners=None))
    looks = []
    for end in range(0, 100_000, 7):
        if end >= core.quiet_nodes:
            looks.append(end)
            unused.look(end)
    assert len(looks) <= 8
