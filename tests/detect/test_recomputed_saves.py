"""Writes inside a checkpointed function to what its own operations have saved: no error, and another gradient.

The truth is the gradient of the same function without the write. In heal mode the program has it, too.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import gradsan
from cases import each

Function = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def sigmoid_doubled(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = torch.sigmoid(x @ w)
    y *= 2
    return y @ w


def product_cut_off(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x @ w
    z = y * y
    y[0] = 0
    return (z + y) @ w


def softmax_dropped_out(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = torch.softmax(x @ w, -1)
    return functional.dropout(y, 0.5, inplace=True) @ w


def written_before_it_is_saved(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x @ w
    y *= 2
    return torch.sigmoid(y) @ w


def relu_of_a_product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return functional.relu(x @ w, inplace=True) @ w


def another_row_is_written(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x @ w
    z = y[0].sin()
    y[1] *= 2
    return y @ w + z


def without_the_write(function: Function) -> Function:
    def pure(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = x @ w
        if function is sigmoid_doubled:
            return (torch.sigmoid(y) * 2) @ w
        if function is product_cut_off:
            return (y * y + torch.cat([torch.zeros_like(y[:1]), y[1:]])) @ w
        if function is softmax_dropped_out:
            return functional.dropout(torch.softmax(y, -1), 0.5) @ w
        if function is written_before_it_is_saved:
            return torch.sigmoid(y * 2) @ w
        if function is relu_of_a_product:
            return functional.relu(y) @ w
        return torch.cat([y[:1], y[1:2] * 2, y[2:]]) @ w + y[0].sin()

    return pure


def gradient(function: Function, *, again: bool) -> torch.Tensor:
    torch.manual_seed(3)
    x, w = torch.randn(4, 5), torch.randn(5, 5, requires_grad=True)
    made = checkpoint(function, x, w, use_reentrant=False) if again else function(x, w)
    made.square().mean().backward()
    assert w.grad is not None
    return w.grad


OVERWRITTEN = (sigmoid_doubled, product_cut_off, softmax_dropped_out)
RIGHT = (written_before_it_is_saved, relu_of_a_product, another_row_is_written)


@pytest.mark.parametrize("mode", ["watch", "deep", "heal"])
@each("function", {one.__name__: one for one in (*OVERWRITTEN, *RIGHT)})
def test_a_write_is_reported_where_the_gradient_is_another(function: str, mode: str) -> None:
    own = globals()[function]
    wanted = gradient(without_the_write(own), again=False)
    with gradsan.watch(mode) as watched:
        found = gradient(own, again=True)
    is_wrong = own in OVERWRITTEN
    assert torch.allclose(gradient(own, again=True), wanted, atol=1e-6) != is_wrong, "of plain PyTorch"
    warned = [one for one in watched.diagnoses if one.severity != "note"]
    assert [one.code for one in warned] == (["GS201"] if is_wrong else []), mode
    assert torch.allclose(found, wanted, atol=1e-6) == (not is_wrong or mode == "heal")
    for one in warned:
        assert [label.frame.function for label in one.labels[:2] if label.frame] == [function, function]
