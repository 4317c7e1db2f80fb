"""``optimizer.step(closure)``: forward and backward run inside a step, as in Lightning's automatic optimization."""

from __future__ import annotations

import pytest
import torch

import gradsan
from cases import each


def net(features=4):
    torch.manual_seed(0)
    return torch.nn.Linear(features, features)


def lines(diagnosis, role):
    from gradsan.source.tree import source_line

    return [(source_line(one.frame.file, one.frame.line) or "").strip() for one in diagnosis.labels if one.role == role]


@each("optimizer_class", [torch.optim.SGD, torch.optim.Adam, torch.optim.LBFGS])
@each("mode", ["watch", "deep"])
def test_a_right_training_is_clean(optimizer_class, mode):
    for _ in range(2):  # twice, since the first training of a process has seen no backward yet
        layer = net()
        optimizer = optimizer_class(layer.parameters())

        def closure(layer=layer, optimizer=optimizer):
            optimizer.zero_grad()
            loss = layer(torch.ones(2, 4)).square().mean()
            loss.backward()
            return loss

        with gradsan.watch(mode) as watched:
            for _ in range(3):
                optimizer.step(closure)
        assert watched.diagnoses == ()


def test_parameters_without_gradient_are_reported_after_the_closure():
    layer, unused = net(), torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([*layer.parameters(), unused], 0.1)

    def closure():
        loss = layer(torch.ones(2, 4)).mean()
        loss.backward()
        return loss

    with gradsan.watch() as watched:
        layer(torch.ones(1, 4)).mean().backward()
        optimizer.zero_grad()
        optimizer.step(closure)
    [diagnosis] = watched.diagnoses
    assert diagnosis.code == "GS421"
    assert [label.message.values["name"] for label in diagnosis.labels] == ["unused"]


def test_a_state_carried_over_the_step():
    layer = net()
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    state = torch.zeros(2, 4)

    def closure():
        nonlocal state
        state = torch.tanh(layer(state))
        loss = state.mean()
        loss.backward(retain_graph=True)
        return loss

    with pytest.raises(RuntimeError), gradsan.watch() as watched:  # noqa: PT012
        for _ in range(3):
            optimizer.step(closure)
    [diagnosis] = watched.diagnoses
    assert diagnosis.code == "GS111"
    assert lines(diagnosis, "saved") == ["state = torch.tanh(layer(state))"]
    assert lines(diagnosis, "written") == ["optimizer.step(closure)"]
    [written] = [one for one in diagnosis.labels if one.role == "written"]
    assert written.message.values.get("count", 1) == 1, "the step that runs has not written yet"


def test_a_write_in_the_closure_is_the_programs():
    layer = net()
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)

    def closure():
        loss = layer(torch.ones(2, 4, requires_grad=True)).square().mean()
        with torch.no_grad():
            layer.weight.clamp_(-0.1, 0.1)
        loss.backward()
        return loss

    with pytest.raises(RuntimeError), gradsan.watch() as watched:
        optimizer.step(closure)
    [diagnosis] = watched.diagnoses
    assert lines(diagnosis, "written") == ["layer.weight.clamp_(-0.1, 0.1)"]
    assert lines(diagnosis, "saved") == ["loss = layer(torch.ones(2, 4, requires_grad=True)).square().mean()"]


def test_a_write_of_the_step_itself_is_the_steps():
    class Mine(torch.optim.SGD):
        def step(self, closure):
            with torch.enable_grad():
                loss = closure()
            with torch.no_grad():
                for parameter in self.param_groups[0]["params"]:
                    parameter.add_(parameter.grad, alpha=-0.1)
            return loss

    layer = net()
    optimizer = Mine(layer.parameters(), 0.1)
    losses = []

    def closure():
        losses.append(layer(torch.ones(2, 4, requires_grad=True)).square().mean())
        losses[-1].backward(retain_graph=True)
        return losses[-1]

    with pytest.raises(RuntimeError), gradsan.watch() as watched:  # noqa: PT012
        optimizer.step(closure)
        losses[0].backward()
    [diagnosis] = watched.diagnoses
    assert diagnosis.code == "GS110"
    assert lines(diagnosis, "written") == ["optimizer.step(closure)"]


def test_a_step_that_still_runs_is_known_as_the_writer():
    theta = torch.zeros(4, requires_grad=True)
    optimizer = torch.optim.LBFGS([theta], lr=0.5, max_iter=5)
    loss = (theta - 1).square().mean() + 0.1 * (theta**2).sum()

    def closure():
        optimizer.zero_grad()
        loss.backward(retain_graph=True)
        return loss

    with pytest.raises(RuntimeError), gradsan.watch() as watched:
        optimizer.step(closure)
    [diagnosis] = watched.diagnoses
    assert diagnosis.code == "GS110"
    assert lines(diagnosis, "written") == ["optimizer.step(closure)"]
