"""The program's own ``__torch_function__`` sees what the program calls, and nothing that gradsan reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

import gradsan
from cases import each


def name_of(function: Any) -> str:
    # A property stands where ``Tensor.data`` was; looked up there, it is what is given to __torch_function__.
    return getattr(function, "__qualname__", str(function)).replace("property.", "getset_descriptor.")


class Listening(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.heard: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.heard.append(name_of(func))
        return func(*args, **(kwargs or {}))


class Publisher(torch.Tensor):
    heard: list[str] = []  # noqa: RUF012 - one list for all, as the class is the program's

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.heard.append(name_of(func))
        return super().__torch_function__(func, types, args, kwargs)


def writes(x: torch.Tensor) -> None:
    y = F.relu(torch.sigmoid(x) + 1)
    y.mul_(2)
    y[1] = 3
    y += 1
    torch.add(y.detach(), 1, out=torch.empty(3))
    torch._foreach_add_([y.detach()], 1)


def trains(x: torch.Tensor) -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        (x * weight).sum().backward()
        optimizer.step()


def passes_the_counter(x: torch.Tensor) -> None:
    y = x * 2
    z = y * y
    y.data.add_(1)
    y.detach().numpy()
    z.sum().backward()


def fails(x: torch.Tensor) -> None:
    y = x.exp()
    y += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def fails_otherwise(x: torch.Tensor) -> None:
    loss = x.exp().sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def heard_by_mode(program: Callable[[torch.Tensor], None]) -> list[str]:
    x = torch.ones(3, requires_grad=True)
    with Listening() as mode:
        program(x)
    return mode.heard


def heard_by_subclass(program: Callable[[torch.Tensor], None]) -> list[str]:
    Publisher.heard.clear()
    program(torch.ones(3).as_subclass(Publisher).requires_grad_())
    return list(Publisher.heard)


@pytest.mark.parametrize("native", [True, False], ids=["native", "pure"])
@each("heard", [heard_by_mode, heard_by_subclass])
@each("program", [writes, trains, passes_the_counter, fails, fails_otherwise])
def test_it_hears_the_same(
    program: Callable[[torch.Tensor], None], heard: Callable[[Callable[[torch.Tensor], None]], list[str]], native: bool
) -> None:
    plain = heard(program)
    with gradsan.watch(native=native) as watched:
        under_gradsan = heard(program)
    assert under_gradsan == plain
    if program in (passes_the_counter, fails):
        assert watched.diagnoses
