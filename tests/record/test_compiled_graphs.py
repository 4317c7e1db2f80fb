"""Graphs that torch.compile makes of a training, with gradsan and without: as many, from as many breaks."""

import contextlib

import pytest
import torch

import gradsan
from forked import call_forked


def optimizer_in_a_function(model, optimizer):
    step = torch.compile(lambda: optimizer.step(), backend="eager")

    def train(batch):
        model(batch).square().mean().backward()
        step()
        optimizer.zero_grad()

    return train


def backward_in_a_function(model, optimizer):
    @torch.compile(backend="aot_eager")
    def loss_of(batch):
        loss = model(batch).square().mean()
        loss.backward()
        return loss

    def train(batch):
        loss_of(batch)
        optimizer.step()
        optimizer.zero_grad()

    return train


def model_compiled(model, optimizer):
    compiled = torch.compile(model, backend="aot_eager")

    def train(batch):
        compiled(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return train


def counts_of(make, stretches, autograd_too=False):
    """The counters of a training after each stretch of it, each under gradsan (in that mode) or without (None)."""
    counters = torch._dynamo.utils.counters
    torch._dynamo.config.compiled_autograd = autograd_too
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    train = make(model, torch.optim.SGD(model.parameters(), lr=0.1, foreach=False))
    found = []
    for mode in stretches:
        with contextlib.nullcontext() if mode is None else gradsan.watch(mode) as watched:
            for _ in range(3):
                train(torch.randn(2, 3))
        assert mode is None or not watched.diagnoses
        breaks = sum(counters["graph_break"].values())
        found.append((counters["stats"]["unique_graphs"], breaks, counters["compiled_autograd"]["captures"]))
    return found, model.weight.tolist(), counters["frames"]["total"]


CASES = [
    (optimizer_in_a_function, False),
    (backward_in_a_function, False),
    pytest.param(backward_in_a_function, True, marks=pytest.mark.long),
]


@pytest.mark.parametrize(("make", "autograd_too"), CASES)
def test_gradsan_adds_no_graph_no_break_and_no_frame(make, autograd_too):
    counts, weight, frames = call_forked(counts_of, make, [None], autograd_too, compiles=True)
    for mode in ("nonfinite", "deep") if make is backward_in_a_function and not autograd_too else ("watch",):
        seen, same, more = call_forked(counts_of, make, [mode], autograd_too, compiles=True)
        assert (mode, seen, same) == (mode, counts, weight)
        # Compiled autograd compiles some 900 frames of torch itself, a few more or fewer in each run.
        assert more <= frames * 1.02, mode


def test_watching_a_compiled_model_compiles_it_once_more_and_never_again():
    """What torch.compile has guarded by identity is replaced while watching; the replacements stay the same objects."""
    counts, _, _ = call_forked(counts_of, model_compiled, [None, "watch", None, "watch", None, "watch"], compiles=True)
    assert [graphs for graphs, _, _ in counts] == [1, 2, 2, 2, 2, 2]
