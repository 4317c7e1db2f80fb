"""Rounding and real differences: sums in other orders, losses and gradients of two runs."""

import math
from array import array

import pytest
import torch

from cases import each
from gradsan.repair.compiled.judging import judged, sizes
from gradsan.repair.compiled.rounding import squared_error, tolerance
from gradsan.repair.trials.trial import Gradients, Recording

NAMES = {"step 3": ("w", "b")}


@each("count", [100, 10_000, 40_000])
@each("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_sum_in_another_order_is_rounding_and_a_lost_term_is_not(count, dtype):
    terms = (torch.rand(count, generator=torch.Generator().manual_seed(0)) + 0.5).to(dtype)
    summed = torch.float32
    one, other = terms.sum(dtype=summed).to(dtype), terms.reshape(-1, 10).sum(1, dtype=summed).sum().to(dtype)
    name = str(dtype).removeprefix("torch.")
    allowed = tolerance(squared_error(name, count), name)
    assert float((one - other).abs() / one) <= allowed < 0.1
    # In the dtype summed in, of which the half types keep nothing.
    if dtype is torch.float32 and count <= 10_000:
        assert float((terms.sum() - terms[:-1].sum()) / terms.sum()) > allowed


def record(loss, *values):
    gradients = tuple(((len(one),), array("d", one).tobytes(), math.hypot(*one)) for one in values)
    return Recording(steps=(Gradients("step 3", gradients),), begun=(loss,), losses=(loss,), finished=True)


def test_each_gradient_is_judged_by_itself_and_a_vanishing_one_by_the_others():
    eager = record(1.0, (1.0, 2.0), (1e-9, 0.0))
    told = judged(eager, record(1.0, (1.0, 2.1), (-1e-9, 0.0)), NAMES, lambda _: 1e-6)
    (found,) = told.found
    assert (found.what, found.name, found.round) == ("gradient", "w", 1)
    assert found.size == pytest.approx(0.1 / math.hypot(1, 2))
    assert (told.losses, told.gradients, told.parameters) == (1, 2, 2)


def test_the_rounding_of_two_plain_runs_is_subtracted():
    eager = record(1.0, (1.0, 2.0), (0.5, 0.5))
    noise = sizes(eager, record(1.0, (1.0, 2.01), (0.5, 0.5)), NAMES)
    told = judged(eager, record(1.0, (1.0, 2.02), (0.5, 0.5)), NAMES, lambda _: 1e-6)
    assert told.beyond(noise, 8.0) == ()
    assert len(told.beyond(noise, 1.0)) == 1


def test_a_loss_that_is_nan_in_one_run_differs():
    told = judged(record(1.0, (1.0,)), record(math.nan, (1.0,)), NAMES, lambda _: 1e-6)
    assert [(one.what, one.size) for one in told.found] == [("loss", math.inf)]
