"""Walks over a graph that several detectors share, and notes of calls that fail."""

import gc
import weakref

import pytest
import torch

import gradsan
from gradsan.detect.gradients import clip_calls
from gradsan.graph import walk
from gradsan.record.recorder import recorder


def test_a_walk_is_made_once_within_a_block_and_let_go_after_it():
    class Halved(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x / 2

        @staticmethod
        def backward(ctx, gradient):
            return gradient / 2

    x = torch.ones(3, requires_grad=True)
    loss = Halved.apply(x.exp()).sum()
    node = weakref.ref(loss.grad_fn.next_functions[0][0])
    with walk.SHARED:
        order = walk.engine_order([loss.grad_fn])
        with walk.SHARED:
            assert walk.engine_order([loss.grad_fn]) is order
        assert walk.engine_order([loss.grad_fn], (x,), accumulates=False) is not order
        assert walk.engine_order([loss.grad_fn]) is order
    assert walk.engine_order([loss.grad_fn]) == order
    assert [one.name() for one in order] == ["SumBackward0", "HalvedBackward", "ExpBackward0"]
    del order, loss
    gc.collect()
    assert node() is None


@pytest.mark.parametrize("native", [True, False])
def test_a_clip_that_cannot_be_noted_is_a_blind_spot_and_no_error(native, monkeypatch):
    def fail(*_):
        raise KeyError("no gradient here")

    weight = torch.nn.Parameter(torch.ones(3))
    monkeypatch.setattr(clip_calls.ClipCalls, "_clipped", fail)
    gradsan.enable(native=native)
    try:
        optimizer = torch.optim.SGD([weight], lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            weight.square().sum().backward()
            torch.nn.utils.clip_grad_norm_([weight], 1.0)
            optimizer.step()
        assert any("no gradient here" in str(one.values) for one in recorder().guard.blind_spots.values())
    finally:
        gradsan.disable()


def test_a_graph_of_one_round_has_no_node_from_before_it():
    weight = torch.ones(3, requires_grad=True)
    kept = weight.exp()
    before = kept.grad_fn._sequence_nr()
    loss = (weight * 2).sum()
    assert not walk.has_older([loss.grad_fn], before + 1)
    assert walk.has_older([(loss + kept).sum().grad_fn], before + 1)
    assert not walk.has_older([(loss + kept).sum().grad_fn], before)
