"""Parameters that a forward reads only past their graph: a warning; what else leaves one without a gradient: none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import gradsan
from cases import each


def first_step(model: nn.Module, held: Any = None, after: Any = None) -> Any:
    """What is said at the first step of an optimizer that holds the model's parameters."""
    optimizer = torch.optim.SGD(model.parameters() if held is None else held, lr=0.1)
    with gradsan.watch() as watched:
        model(torch.ones(2, 3)).pow(2).sum().backward()
        optimizer.step()
        if after is not None:
            after(model)
    return [(one.severity, one.tensor.name if one.tensor else None) for one in watched.diagnoses if one.code == "GS421"]


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(3, 3)
        self.shift = nn.Parameter(torch.zeros(3))
        nn.init.ones_(self.shift)
        self.shift.data.mul_(0.5)


class ByData(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(x) + self.shift.data


class ByDetach(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(x) + self.shift.detach()


class ByDataOfASlice(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        width = self.shift.shape[0]
        return self.lin(x) + self.shift.data[:width].unsqueeze(0)


class InAHelper(Base):
    def moved(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.shift.data.to(x.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.moved(self.lin(x))


class InALambda(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (lambda t: t + self.shift.detach())(self.lin(x))


class InAProperty(Base):
    @property
    def fixed(self) -> torch.Tensor:
        return self.shift.data

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(x) + self.fixed


@each("kind", [ByData, ByDetach, ByDataOfASlice, InAHelper, InALambda, InAProperty])
def test_a_parameter_read_past_its_graph(kind: Any) -> None:
    model = kind()
    assert first_step(model) == [("warning", "model.shift")]


def test_of_a_layer_of_torchs() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.words = nn.Linear(3, 3), nn.Embedding(4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.lin(x) @ self.words.weight.data.t()

    model = Tied()
    assert first_step(model) == [("warning", "model.words.weight")]


def test_beside_others_that_are_not_used() -> None:
    class Both(ByData):
        def __init__(self) -> None:
            super().__init__()
            self.unused = nn.Parameter(torch.ones(3))

    model = Both()
    assert first_step(model) == [("warning", "model.shift"), ("note", "model.unused")]


class AlsoAsItIs(Base):
    def penalty(self) -> torch.Tensor:
        return self.shift.pow(2).sum()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(x) + self.shift.data


class HandedOn(Base):
    def penalty(self) -> torch.Tensor:
        return torch.sum(self.shift)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(x) + self.shift.detach()


class Written(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.shift.data.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return self.lin(x) + self.shift.data


class Replaced(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.shift.data = 0.9 * self.shift.data
        return self.lin(x) + self.shift.detach()


class WrittenByAHelper(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        smooth(self.shift.detach(), x)
        return self.lin(x) + self.shift.detach()


def smooth(mean: torch.Tensor, x: torch.Tensor) -> None:
    mean.mul_(0.9).add_(x.mean(0), alpha=0.1)


class OnlyItsShape(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(x) * self.shift.shape[0]


class NotRead(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(x)


class OnlyElsewhere(Base):
    def show(self) -> torch.Tensor:
        return self.shift.detach()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(x)


class UnderNoGrad(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            shift = self.shift * 2
        return self.lin(x) + shift


@each(
    "kind",
    [
        AlsoAsItIs,
        HandedOn,
        Written,
        Replaced,
        WrittenByAHelper,
        OnlyItsShape,
        NotRead,
        OnlyElsewhere,
        UnderNoGrad,
    ],
)
def test_reads_that_may_be_meant_are_notes(kind: Any) -> None:
    model = kind()
    assert first_step(model) == [("note", "model.shift")]


class Whole(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(x) + self.shift


def test_with_a_gradient_nothing_is_said() -> None:
    assert first_step(Whole()) == []


def test_parameters_of_no_optimizer_are_no_finding() -> None:
    model = ByData()
    assert first_step(model, held=model.lin.parameters()) == []


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        (ByData, "        return self.lin(x) + self.shift"),
        (ByDetach, "        return self.lin(x) + self.shift"),
        (InAHelper, "        return x + self.shift.to(x.dtype)"),
    ],
)
def test_the_suggested_line_reads_the_parameter(kind: Any, line: str) -> None:
    model = kind()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gradsan.watch() as watched:
        model(torch.ones(2, 3)).pow(2).sum().backward()
        optimizer.step()
    (fix,) = watched.diagnoses[0].fixes
    assert [text for _, _, text in fix.lines] == [line]
