"""Saved tensors of compiled graphs: the same code, lines, operation and formula as without the compiler."""

import subprocess
import sys

import pytest
import torch
from torch import nn

import gradsan
from forked import call_forked

VALUES = torch.linspace(-1.0, 1.0, 12).reshape(3, 4)


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(4, 5)
        self.policy, self.value = nn.Linear(5, 2), nn.Linear(5, 1)

    def forward(self, x):
        hidden = torch.tanh(self.trunk(x))
        return self.policy(hidden), self.value(hidden)


class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        self.fresh, self.kept = nn.Linear(4, 5), nn.Linear(5, 5)

    def forward(self, x, state):
        return torch.sigmoid(self.fresh(x) + self.kept(state))


def squashed(x, weight):
    return torch.tanh(x @ weight)


def result_masked(compiled):
    weight = torch.ones(4, 2, requires_grad=True)
    out = compiled(squashed)(VALUES, weight)
    out.masked_fill_(out > 0, 0.0)
    out.sum().backward()


def batch_refilled(compiled):
    weight = torch.ones(4, 2, requires_grad=True)
    batch = VALUES.clone()
    loss = compiled(squashed)(batch, weight).sum()
    batch.zero_()
    loss.backward()


def compared(features, bank, temperature):
    return features @ bank.T / temperature


def bank_refilled(compiled):
    encoder, bank = nn.Linear(4, 2), torch.ones(5, 2)
    # The temperature that varies comes as a tensor, and both matrices have sizes that vary.
    loss = compiled(compared)(encoder(VALUES), bank, 0.2).sum()
    bank[2:] = 0.0
    loss.backward()


def parts_of_a_layer(compiled):
    net = nn.Sequential(nn.Linear(4, 3), nn.Softplus(), nn.Linear(3, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    out = compiled(net)(VALUES)
    out.sum().backward(retain_graph=True)
    optimizer.step()
    out.square().sum().backward()


def state_carried(compiled):
    cell = Cell()
    step = compiled(cell)
    optimizer = torch.optim.SGD(cell.parameters(), lr=0.1)
    state = torch.zeros(3, 5)
    for _ in range(3):
        state = step(VALUES, state)
        loss = state.sum()
        optimizer.zero_grad()
        loss.backward(retain_graph=True)
        optimizer.step()


def written_after_a_break(x, weight):
    gain = torch.exp(x @ weight)
    torch._dynamo.graph_break()
    gain.clamp_(max=1.5)
    return gain.sum()


def graph_broken(compiled):
    weight = torch.ones(4, 2, requires_grad=True)
    loss = compiled(written_after_a_break)(VALUES, weight)
    loss.backward()


def gru_window(cell, readout):
    def run(xs, h):
        outs = []
        for x in xs.unbind(0):
            h = cell(x, h)
            outs.append(readout(h))
        return torch.stack(outs), h

    return run


def graph_carried(compiled):
    cell, readout = nn.GRUCell(4, 5), nn.Linear(5, 1)
    # The first state needs no gradient, so that the compiler compiles the function anew for the second round.
    run = compiled(gru_window(cell, readout))
    h = torch.zeros(3, 5)
    for _ in range(2):
        out, h = run(VALUES.reshape(1, 3, 4), h)
        out.square().mean().backward()


def generator_stepped(compiled):
    generator, critic = nn.Sequential(nn.Linear(4, 5), nn.Tanh()), nn.Sequential(nn.Linear(5, 3), nn.Tanh())
    make, score = compiled(generator), compiled(critic)
    optimizer = torch.optim.SGD(generator.parameters(), lr=0.1)
    fake = make(VALUES)
    loss = -score(fake).mean()
    loss.backward()
    optimizer.step()
    # This call compiles the critic anew (its input has a graph); the compiler's own backward frees nothing.
    wanted = score(VALUES.new_ones(3, 5)).mean() - score(fake).mean()
    wanted.backward()


def features_computed_once(compiled):
    encoder, head = nn.Sequential(nn.Linear(4, 5), nn.Tanh()), nn.Linear(5, 1)
    features = compiled(encoder)(VALUES)
    for _ in range(2):
        loss = head(features).square().sum()
        loss.backward()


def told(program, backend, options, mode="watch"):
    def compiled(one):
        return one if backend is None else torch.compile(one, backend=backend, **options)

    torch.manual_seed(0)
    with pytest.raises(RuntimeError, match=r"modified by an inplace|a second time"), gradsan.watch(mode) as watched:
        program(compiled)
    (found,) = watched.diagnoses
    labels = [(one.role, one.frame.line, one.frame.function) for one in found.labels]
    # A graph that was freed hangs on the compiled Node itself.
    op = None if found.code in ("GS401", "GS402", "GS403") else found.tensor.op
    return found.code, labels, found.tensor.name, op, found.why and found.why.formula


OVERWRITTEN = (result_masked, batch_refilled, bank_refilled, parts_of_a_layer, state_carried, graph_broken)
FREED = {graph_carried: "GS401", generator_stepped: "GS402", features_computed_once: "GS403"}
PROGRAMS = (*OVERWRITTEN, *FREED)


def told_by_all():
    """(compiled, plain) of each program, by name; all in one process, as the compiler is long in coming."""
    options = {name: {"dynamic": True} for name in ("batch_refilled", "bank_refilled")}
    return {
        one.__name__: (told(one, "aot_eager", options.get(one.__name__, {})), told(one, None, {})) for one in PROGRAMS
    }


def test_as_without_the_compiler():
    found = call_forked(told_by_all, compiles=True)
    assert [name for name, (compiled, plain) in found.items() if compiled != plain] == [], found
    assert {one: found[one.__name__][0][0] for one in FREED} == FREED


def told_in_deep_mode():
    return told(result_masked, "aot_eager", {}, "deep"), told(result_masked, None, {}, "deep")


def test_as_without_the_compiler_in_deep_mode():
    """Its hooks on saved tensors are aside while the traced graph is run."""
    compiled, plain = call_forked(told_in_deep_mode, compiles=True)
    assert compiled == plain


def step_on_one_head():
    torch.manual_seed(0)
    model = Heads()
    optimizer = torch.optim.SGD(model.value.parameters(), lr=0.1)
    with gradsan.watch() as watched:
        policy, value = torch.compile(model, backend="aot_eager")(VALUES)
        value.sum().backward(retain_graph=True)
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace"):
            policy.sum().backward()
    (found,) = watched.diagnoses
    line = found.labels[0].frame.line - Heads.forward.__code__.co_firstlineno
    return [note.key for note in found.notes], [fix.kind for fix in found.fixes], line


def test_values_kept_only_by_the_compiler_are_named_so():
    """Both heads are one Node; without the compiler the step on one of them does not touch the other's backward."""
    notes, kinds, line = call_forked(step_on_one_head, compiles=True)
    assert "note.kept_only_in_compiled" in notes
    assert kinds[-1] == "outside_of_compile"
    assert line == 2


def paired(one, other, weight):
    return one @ weight, other @ weight


def backward_of_one_result(written):
    weight = torch.ones(4, 1, requires_grad=True)
    one, other = VALUES.repeat(2, 1, 1), VALUES.repeat(3, 1, 1)
    with gradsan.watch() as watched:
        result, _ = torch.compile(paired)(one, other, weight)
        (one if written == "one" else other).zero_()
        result.sum().backward()
    return [(found.code, found.tensor.name, found.labels[0].frame.line) for found in watched.diagnoses]


def test_inductor_keeps_views_without_their_counter():
    """A write that this backward computes with is told, one that only another result needs is not."""
    line = paired.__code__.co_firstlineno + 1
    assert call_forked(backward_of_one_result, "one", compiles=True) == [("GS219", "one", line)]
    assert call_forked(backward_of_one_result, "other", compiles=True) == []


RIGHT_TRAINING = """
import torch

weight = torch.randn(4, 8, requires_grad=True)
optimizer = torch.optim.SGD([weight], lr=0.01)
project = torch.compile(lambda batch: batch @ weight)
for _ in range(5):
    optimizer.zero_grad()
    project(torch.randn(3, 4)).tanh().pow(2).mean().backward()
    optimizer.step()
print("trained")
"""


def test_buffers_of_inductor_are_its_own(tmp_path):
    """Its code fills ``buf0`` by ``mm(…, out=buf0)``, in the forward of a Function of PyTorch's."""
    (tmp_path / "train.py").write_text(RIGHT_TRAINING)
    command = [sys.executable, "-m", "gradsan", "run", "train.py"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (0, "trained\n")
    assert "GS" not in ran.stderr
