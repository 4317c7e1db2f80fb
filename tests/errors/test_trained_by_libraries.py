"""Programs whose training loop, or whose backward, lies in a library: what is named lies in the program."""

from __future__ import annotations

import runpy
import sys
import threading

import gradsan
from cases import each

LIBRARY = """
def scaled(loss):
    (loss / 2).backward()

def trained(net, x):
    net(x).log_softmax(1).neg().backward()

def fit(module, rounds, *listeners):
    last = None
    for index in range(rounds):
        loss = module.training_step(index)
        loss.backward()
        last = loss  # alive in the next round
        for one in listeners:
            one.on_step(loss)
"""


def run(tmp_path, monkeypatch, program):
    """Run a program that may import ``training_library``; return its diagnoses and its own exceptions."""
    library = tmp_path / "site-packages"
    library.mkdir()
    (library / "training_library.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(str(library))
    monkeypatch.delitem(sys.modules, "training_library", raising=False)
    file = tmp_path / "train.py"
    file.write_text(program)
    watched, raised = gradsan.watch(), []

    def run_file():
        try:
            with watched:
                runpy.run_path(str(file))
        except RuntimeError as error:
            raised.append(str(error))

    # What calls the program is no code of the user's, as under ``gradsan run``.
    thread = threading.Thread(target=run_file)
    thread.start()
    thread.join()
    return watched.diagnoses, raised


OWN_LOSS = """
import torch
import training_library

class Net(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x)

net, x = Net(3, 2), torch.ones(4, 3)
error = net(x).exp()
training_library.{call}
"""


@each("call, name", [("scaled(error)", "error"), ("trained(net, x)", None)])
def test_only_a_loss_that_was_scaled_is_the_programs(tmp_path, monkeypatch, call, name):
    [found], [raised] = run(tmp_path, monkeypatch, OWN_LOSS.format(call=call))
    assert "only for scalar outputs" in raised
    assert (found.code, found.tensor and found.tensor.name) == ("GS408", name)
    assert bool(found.fixes[0].lines) == (name is not None)


KEPT = """
import torch
import training_library

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.past = torch.nn.Linear(3, 1), []

    def training_step(self, index):
        value = self.layer(torch.ones(4, 3)).square().mean()
        {in_step}
        return value

class Meter:
    def __init__(self):
        self.sums = {{}}

    def on_step(self, value):
        self.add(value=value)

    def add(self, **values):
        for name, one in values.items():
            {in_meter}

training_library.fit(Net(), 40, Meter())
"""


@each(
    "in_step, in_meter, line",
    [
        ("self.past.append(value)", "pass", "self.past.append(value.detach())"),
        (
            "pass",
            "self.sums[name] = self.sums.get(name, 0.0) + one",
            "self.sums[name] = self.sums.get(name, 0.0) + one.detach()",
        ),
        ("pass", "self.sums.setdefault(name, []).append(one)", "self.sums.setdefault(name, []).append(one.detach())"),
        ("pass", "self.sums[name] = one", None),
        ("self.past.append(value.detach())", "self.sums[name] = self.sums.get(name, 0.0) + one.item()", None),
    ],
)
def test_values_kept_with_their_graph_by_what_only_the_library_holds(tmp_path, monkeypatch, in_step, in_meter, line):
    found, raised = run(tmp_path, monkeypatch, KEPT.format(in_step=in_step, in_meter=in_meter))
    assert (raised, [one.code for one in found]) == ([], ["GS422"] if line else [])
    assert [one.fixes[0].lines[0][2].strip() for one in found] == ([line] if line else [])


CARRIED = """
import torch
import training_library

class Cell(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.out = torch.nn.{kind}(3, 4), torch.nn.Linear(4, 1)
        self.carry, self.terms = None, []

    def forward(self, x):
        {forward}

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = Cell()

    def training_step(self, index):
        "One round."
        return {loss}

def train(net):
    training_library.fit(net, 3)

{run}
"""


@each(
    "kind, forward, loss, lines",
    [
        (
            "GRUCell",
            "self.carry = self.inner(x, self.carry); return self.out(self.carry)",
            "self.cell(torch.ones(2, 3)).mean()",
            ["if self.cell.carry is not None:", "self.cell.carry = self.cell.carry.detach()"],
        ),
        (
            "GRU",
            "out, self.carry = self.inner(x, self.carry); return self.out(out)",
            "self.cell(torch.ones(2, 3)).mean()",
            ["if self.cell.carry is not None:", "self.cell.carry = self.cell.carry.detach()"],
        ),
        (
            "LSTMCell",
            "self.carry = self.inner(x, self.carry); return self.out(self.carry[0])",
            "self.cell(torch.ones(2, 3)).mean()",
            ["if self.cell.carry is not None:", "self.cell.carry = tuple(s.detach() for s in self.cell.carry)"],
        ),
        (
            "Linear",
            "h = self.inner(x).tanh(); self.terms.append(h.square().mean()); return self.out(h)",
            "self.cell(torch.ones(2, 3)).mean() + sum(self.cell.terms)",
            ["self.cell.terms.clear()"],
        ),
    ],
)
def test_what_rounds_of_a_library_leave_in_an_object_is_cut_where_the_next_begins(
    tmp_path, monkeypatch, kind, forward, loss, lines
):
    for name, run_it in (("named", "net = Net()\ntrain(net)"), ("inline", "train(Net())")):
        folder = tmp_path / name
        folder.mkdir()
        program = CARRIED.format(kind=kind, forward=forward, loss=loss, run=run_it)
        [found], [raised] = run(folder, monkeypatch, program)
        assert "second time" in raised
        _, at, new = found.fixes[0].lines[0]
        assert [one.strip() for one in new.splitlines()] == [*lines, f"return {loss}"]
        assert program.splitlines()[at - 1].strip() == f"return {loss}"


IN_LAYERS = """
class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.kept = torch.nn.GRUCell(3, 3), {}

    def forward(self, x):
        self.kept["h"] = self.cell(x, self.kept.get("h"))
        return self.kept["h"]

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer() for _ in range(2))

    def training_step(self, index):
        x = torch.ones(2, 3)
        for layer in self.layers:
            x = layer(x)
        return x.mean()
"""
AVERAGED = """
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.average = torch.nn.Linear(3, 1), 1.0

    def training_step(self, index):
        loss = self.layer(torch.ones(4, 3)).square().mean()
        self.average = 0.9 * self.average + 0.1 * loss
        return loss / self.average
"""


@each("net", [IN_LAYERS, AVERAGED])
def test_no_line_is_told_that_does_not_fit_the_first_round(tmp_path, monkeypatch, net):
    start = "import torch\nimport training_library\n"
    end = "def train(net):\n    training_library.fit(net, 3)\n\ntrain(Net())\n"
    [found], _ = run(tmp_path, monkeypatch, f"{start}{net}{end}")
    assert (found.code, found.fixes[0].lines) == ("GS401", ())
