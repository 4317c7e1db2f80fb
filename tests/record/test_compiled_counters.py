"""Compiled programs, ten with ``--long``: the compiler's own counters are the same with gradsan as without."""

import contextlib

import torch
from torch import nn

import gradsan
from forked import call_forked

BATCH = torch.linspace(-1.0, 1.0, 12).reshape(3, 4)
AOT = {"backend": "aot_eager"}


def trained(model, run, rounds=2, batches=(BATCH, BATCH)):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for at in range(rounds):
        run(batches[at % len(batches)]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def whole_model():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 1))
    trained(model, torch.compile(model, **AOT))


def in_regions():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    model[0] = torch.compile(model[0], **AOT)
    trained(model, model)


def whole_graph():
    model = nn.Linear(4, 2)
    trained(model, torch.compile(lambda x: torch.softmax(model(x), -1), fullgraph=True, **AOT))


def sizes_vary():
    model = nn.Linear(4, 2)
    run = torch.compile(model, dynamic=True, **AOT)
    trained(model, run, 3, (BATCH, BATCH[:2]))


def recompiled():
    model = nn.Linear(4, 2)
    trained(model, torch.compile(model, **AOT), 3, (BATCH, BATCH[:2]))


def broken_by_a_print():
    model = nn.Linear(4, 2)

    def run(x):
        hidden = model(x)
        torch._dynamo.graph_break()
        return hidden.tanh()

    trained(model, torch.compile(run, **AOT))


def broken_by_a_value():
    model = nn.Linear(4, 2)

    def run(x):
        hidden = model(x)
        if hidden.max() > 100:
            hidden = hidden.clamp(max=100)
        return hidden * 2

    trained(model, torch.compile(run, **AOT))


def statistics_inside():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    trained(model, torch.compile(model, **AOT))


def loss_compiled():
    model = nn.Linear(4, 2)
    loss = torch.compile(nn.functional.mse_loss, **AOT)
    trained(model, lambda x: loss(model(x), torch.ones(len(x), 2)))


def backward_inside():
    model = nn.Linear(4, 2)

    @torch.compile(**AOT)
    def run(x):
        loss = model(x).square().mean()
        loss.backward()
        return loss

    for _ in range(2):
        run(BATCH)


PROGRAMS = (
    whole_model,
    in_regions,
    whole_graph,
    sizes_vary,
    recompiled,
    broken_by_a_print,
    broken_by_a_value,
    statistics_inside,
    loss_compiled,
    backward_inside,
)


IN_SHORT = (whole_model, recompiled, broken_by_a_value)


def counts(mode, programs):
    found = {}
    for program in programs:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        torch.manual_seed(0)
        with contextlib.nullcontext() if mode is None else gradsan.watch(mode) as watched:
            program()
        assert mode is None or not watched.diagnoses
        counters = torch._dynamo.utils.counters
        found[program.__name__] = {
            name: dict(counters[name]) for name in ("stats", "frames", "graph_break", "aot_autograd", "recompiles")
        }
    # A backward inside compiles frames of torch itself, one more or fewer in each run (test_compiled_graphs.py).
    found.get("backward_inside", {}).pop("frames", None)
    return found


def test_the_compiler_counts_the_same(pytestconfig):
    programs = PROGRAMS if pytestconfig.getoption("--long") else IN_SHORT
    assert call_forked(counts, "watch", programs, compiles=True) == call_forked(counts, None, programs, compiles=True)
