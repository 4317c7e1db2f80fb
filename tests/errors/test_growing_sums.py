"""Sums that take in a graph of every round: named where no backward uses them, and only there."""

from types import SimpleNamespace

import torch
from torch import nn

import gradsan
from cases import each

BATCH, WIDTH, ROUNDS, STEPS = 32, 64, 400, 2_500


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))


def loss_of(model):
    return model(torch.randn(BATCH, 8)).pow(2).mean()


def grown(watch):
    return [one for one in watch.diagnoses if one.code == "GS422"]


def sum_in_place(model):
    total = torch.zeros(())
    for _ in range(ROUNDS):
        total += loss_of(model)
    return total.item()


def sum_bound_anew(model):
    total = 0.0
    for _ in range(ROUNDS):
        total = total + loss_of(model) / ROUNDS
    return float(total)


def moving_average(model):
    average = torch.zeros(())
    for _ in range(ROUNDS):
        average = 0.99 * average + 0.01 * loss_of(model)
    return float(average)


def joined(model):
    outputs = torch.empty(0, 1)
    for _ in range(ROUNDS):
        outputs = torch.cat([outputs, model(torch.randn(BATCH, 8))])
    return outputs.mean().item()


def in_a_dictionary(model):
    metrics = {"loss": 0.0, "rounds": 0}
    for _ in range(ROUNDS):
        metrics["loss"] += loss_of(model)
        metrics["rounds"] += 1
    return float(metrics["loss"])


def in_an_attribute(model):
    meter = SimpleNamespace(total=0.0)
    for _ in range(ROUNDS):
        meter.total += loss_of(model)
    return float(meter.total)


NAMES = {
    sum_in_place: "total",
    sum_bound_anew: "total",
    moving_average: "average",
    joined: "outputs",
    in_a_dictionary: 'metrics["loss"]',
    in_an_attribute: "meter.total",
}


@each("program", NAMES)
def test_sums_that_no_backward_uses_are_named_at_their_line(program):
    with gradsan.watch() as watch:
        program(net())
    (found,) = grown(watch)
    assert found.severity == "warning"
    assert found.title.values["name"] == NAMES[program]
    # Tanh keeps its result, which the layer behind it shares; the first layer keeps the input.
    floats = BATCH * (8 + WIDTH)
    assert 4 * floats <= found.labels[0].message.values["bytes"] <= 4 * floats + 8_000
    assert all(label.frame.file == __file__ for label in found.labels)


def test_it_is_reported_though_training_goes_on_afterwards():
    model = net()
    with gradsan.watch() as watch:
        sum_in_place(model)
        loss_of(model).backward()
    assert len(grown(watch)) == 1


def use_sum(model):
    total = torch.zeros(())
    for _ in range(3 * ROUNDS):
        total += loss_of(model)
    (total / ROUNDS).backward()


def use_sum_by_grad(model):
    total = 0.0
    for _ in range(3 * ROUNDS):
        total = total + loss_of(model)
    torch.autograd.grad(total, list(model.parameters()))


def use_list_of_many(model):
    losses = []
    for _ in range(11 * ROUNDS):  # more Nodes than a walk of the graph reads
        losses.append(loss_of(model))
    torch.stack(losses).mean().backward()


def recurrent_with_a_loss_in_each_step(_):
    cell, state, loss = nn.RNNCell(4, 4), torch.zeros(2, 4), 0.0
    for _ in range(STEPS):
        state = cell(torch.randn(2, 4), state)
        loss = loss + state.pow(2).mean()
    loss.backward()


def recurrent(_):
    cell, state = nn.RNNCell(4, 4), torch.zeros(2, 4)
    for _ in range(STEPS):
        state = cell(torch.randn(2, 4), state)
    state.sum().backward()


def recurrent_never_used(_):
    cell, state = nn.GRUCell(4, 4), torch.zeros(2, 4)
    for _ in range(1_000):
        state = cell(torch.randn(2, 4), state)
    return state.sum().item()


def residual_never_used(_):
    layer, hidden = nn.Linear(4, 4), torch.zeros(2, 4)
    for _ in range(1_000):
        hidden = hidden + 0.01 * layer(hidden).tanh()
    return hidden.sum().item()


def sum_of_each_epoch(model):
    for _ in range(60):
        total = 0.0
        for _ in range(10):
            total = total + loss_of(model)
        print(float(total))


def sum_of_values(model):
    total = torch.zeros(())
    for _ in range(ROUNDS):
        total += loss_of(model).detach()
    return total.item()


@each(
    "program",
    [
        use_sum,
        use_sum_by_grad,
        use_list_of_many,
        recurrent_with_a_loss_in_each_step,
        recurrent,
        recurrent_never_used,
        residual_never_used,
        sum_of_each_epoch,
        sum_of_values,
    ],
)
def test_sums_used_or_released_are_no_finding(program):
    with gradsan.watch() as watch:
        program(net())
    assert watch.diagnoses == ()
