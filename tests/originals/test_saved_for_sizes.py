"""Operations that save what they are given for its sizes alone: an unseen write does their gradient no harm."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional

import gradsan
from cases import each

ROWS = torch.tensor([0, 2])
OPERATIONS = {
    "adaptive_avg_pool2d": (lambda x: functional.adaptive_avg_pool2d(x, 2), (2, 3, 6, 5)),
    "adaptive_avg_pool3d": (lambda x: functional.adaptive_avg_pool3d(x, 2), (2, 3, 4, 4, 4)),
    "adaptive_max_pool2d": (lambda x: functional.adaptive_max_pool2d(x, 2), (2, 3, 6, 5)),
    "adaptive_max_pool3d": (lambda x: functional.adaptive_max_pool3d(x, 2), (2, 3, 4, 4, 4)),
    "avg_pool2d": (lambda x: functional.avg_pool2d(x, 2), (2, 3, 6, 4)),
    "avg_pool3d": (lambda x: functional.avg_pool3d(x, 2), (2, 3, 4, 4, 4)),
    "fractional_max_pool2d": (lambda x: functional.fractional_max_pool2d(x, 2, output_size=2), (2, 3, 6, 6)),
    "fractional_max_pool3d": (lambda x: functional.fractional_max_pool3d(x, 2, output_size=2), (2, 3, 6, 6, 6)),
    "max_pool1d": (lambda x: functional.max_pool1d(x, 2), (2, 3, 6)),
    "max_pool3d": (lambda x: functional.max_pool3d(x, 2), (2, 3, 4, 4, 4)),
    "reflect_1d": (lambda x: functional.pad(x, (1,) * 2, mode="reflect"), (2, 3, 5)),
    "reflect_2d": (lambda x: functional.pad(x, (1,) * 4, mode="reflect"), (2, 3, 5, 5)),
    "reflect_3d": (lambda x: functional.pad(x, (1,) * 6, mode="reflect"), (2, 3, 5, 5, 5)),
    "replicate_1d": (lambda x: functional.pad(x, (1,) * 2, mode="replicate"), (2, 3, 5)),
    "replicate_2d": (lambda x: functional.pad(x, (1,) * 4, mode="replicate"), (2, 3, 5, 5)),
    "replicate_3d": (lambda x: functional.pad(x, (1,) * 6, mode="replicate"), (2, 3, 5, 5, 5)),
    "rfft": (lambda x: torch.view_as_real(torch.fft.rfft(x)), (3, 8)),
    "gather": (lambda x: x.gather(1, torch.tensor([[0], [2]])), (2, 3)),
    "index_add": (lambda x: torch.zeros(4, 3).index_add(0, ROWS, x), (2, 3)),
    "index_copy": (lambda x: torch.zeros(4, 3).index_copy(0, ROWS, x), (2, 3)),
    "nll_loss": (lambda x: functional.nll_loss(x, ROWS), (2, 3)),
    "nll_loss2d": (lambda x: functional.nll_loss(x, ROWS[:, None]), (2, 3, 1)),
}


def through_data(value: torch.Tensor) -> None:
    value.data.mul_(-3)


def through_numpy(value: torch.Tensor) -> None:
    shown = value.detach().numpy()
    np.negative(shown, out=shown)


@pytest.mark.filterwarnings("ignore::UserWarning")
@each("mode", ["watch", "deep"])
@each("change", [through_data, through_numpy])
@each("name", OPERATIONS)
def test_gradient_is_right_and_nothing_is_said(name, change, mode):
    function, shape = OPERATIONS[name]
    torch.manual_seed(0)
    x = torch.randn(shape, requires_grad=True)
    gradients = []
    for changed in (False, True):
        torch.manual_seed(1)
        with gradsan.watch(mode) as watched:
            value = x * 2
            result = function(value)
            if changed:
                change(value)
            gradients += torch.autograd.grad(result.square().sum(), x)
    assert torch.equal(*gradients)
    assert [one.code for one in watched.diagnoses] == []
