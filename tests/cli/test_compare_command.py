"""``gradsan compare`` as people call it: the verdict, what differs, where it begins, and the program that shows it."""

import json

import pytest

from cases import each

SAME = """
import torch
from torch import nn

torch.manual_seed(1)
first, second = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Dropout(0.2)), nn.Linear(8, 3)
optimizer = torch.optim.Adam([*first.parameters(), *second.parameters()])
body = torch.compile(first, backend="aot_eager")
head = torch.compile(second, backend="aot_eager")
for _ in range(9):
    loss = nn.functional.cross_entropy(head(body(torch.randn(5, 6))), torch.randint(0, 3, (5,)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print("a round")
"""

# One kernel for Inductor's C++ compiler.
RANDOM = """
import torch
from torch import nn

torch.manual_seed(1)
net = nn.Sequential(nn.Dropout(0.2), nn.Linear(6, 3, bias=False))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
run = torch.compile(net)
for _ in range(9):
    loss = nn.functional.cross_entropy(run(torch.randn(5, 6)), torch.randint(0, 3, (5,)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""

LOST = """
import torch

torch.manual_seed(0)
weight = torch.randn(8, 4, requires_grad=True)
optimizer = torch.optim.SGD([weight], lr=0.1)
product = torch.compile(lambda batch: batch.flatten(0, 1) @ weight)
for _ in range(9):
    batch = torch.randn(2, 3, 8)
    out = product(batch)
    batch.add_(1.0)
    optimizer.zero_grad()
    out.square().sum().backward()
    optimizer.step()
"""

BENT = """
import torch


class Bent(torch.fx.Interpreter):
    def call_function(self, target, args, kwargs):
        if getattr(target, "__name__", "") == "softplus":
            return super().call_function(torch.nn.functional.relu, args[:1], {})
        return super().call_function(target, args, kwargs)


def bent(graph, inputs):
    return lambda *given: Bent(graph).run(*given)
"""

LAYERS = """
import torch
from torch import nn

import backends


class Gate(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x):
        return x * torch.sigmoid(self.inner(x))


class Scale(nn.Module):
    def forward(self, x):
        return x * nn.functional.softplus(x)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.gates, self.scale, self.out = nn.Sequential(Gate(), Gate()), Scale(), nn.Linear(6, 1)

    def forward(self, x):
        return self.out(self.scale(self.gates(x)))


net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
run = torch.compile(net, backend=backends.bent)
for _ in range(9):
    loss = run(torch.randn(4, 6)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""

HOOKED = LAYERS.replace("backends.bent", '"aot_eager"').replace(
    "for _ in range(9):",
    "for step in range(9):\n    if step == 1:\n        net.scale.register_forward_hook(lambda *given: given[-1] * 3)",
)

ANEW = """
import os

import torch

weight = torch.ones(4, requires_grad=True)
loss = torch.compile(lambda x: (x * weight).sum().exp(), backend="aot_eager")
for _ in range(2):
    loss(torch.tensor([one / 255 for one in os.urandom(4)])).backward()
"""


def compare(folder, run, text, *words):
    (folder / "train.py").write_text(text)
    done = run("compare", "--json", "out.json", *words, "train.py")
    report = folder / "out.json"
    return done, json.loads(report.read_text()) if report.exists() else None


@pytest.mark.long
def test_several_compiled_modules_compute_what_eager_code_does(tmp_path, run_warm_compiler):
    done, report = compare(tmp_path, run_warm_compiler, SAME, "--rounds", "2")
    assert (done.status, report["verdict"]) == (0, "same")
    assert report["compared"] == {"rounds": 2, "losses": 2, "gradients": 8, "parameters": 4}
    assert done.stdout.startswith("compiled = eager within")
    assert "a round" not in done.stdout
    assert report["doubts"]


def test_random_numbers_of_inductor_are_a_doubt(tmp_path, run_warm_compiler):
    done, report = compare(tmp_path, run_warm_compiler, RANDOM, "--lang", "zh")
    assert (done.status, report["verdict"]) == (0, "same")
    assert "fallback_random" in done.stdout
    assert "编译结果 = eager" in done.stdout
    assert report["largest"] < report["allowed"]


def test_a_gradient_that_the_compiler_gets_wrong(tmp_path, run_python, run_warm_compiler):
    done, report = compare(tmp_path, run_warm_compiler, LOST, "--write", "shown.py")
    assert (done.status, report["verdict"], report["stage"]) == (66, "differs", "write")
    assert [one["code"] for one in report["findings"]] == ["GS219"]
    first = report["differences"][0]
    assert (first["what"], first["name"], first["round"]) == ("gradient", "weight", 1)
    assert first["size"] > 0.1
    assert "eager code ends with RuntimeError" in done.stdout
    assert "train.py:7" in done.stdout
    # Without the user's program, with other numbers, the same is seen.
    (tmp_path / "train.py").unlink()
    shown = run_python("shown.py", is_warm=True)
    assert (shown.status, "gradients by" in shown.stdout) == (1, True), shown.stderr


def test_the_layer_and_the_operation_are_found(tmp_path, run_warm_compiler):
    (tmp_path / "backends.py").write_text(BENT)
    done, report = compare(tmp_path, run_warm_compiler, LAYERS)
    assert (done.status, report["stage"]) == (66, "fragment")
    fragment = report["fragment"]
    assert (fragment["ops"], fragment["layer"], fragment["backend"]) == (["softplus"], ["scale", "Scale"], "bent")
    assert not fragment["also_aot"]
    assert "first layer: scale (Scale)" in done.stdout


def test_a_traced_branch_that_the_program_leaves_is_reported(tmp_path, run_warm_compiler):
    (tmp_path / "backends.py").write_text(BENT)
    done, report = compare(tmp_path, run_warm_compiler, HOOKED)
    assert (done.status, report["stage"], report["fragment"]) == (66, "tracing", None)
    assert report["differences"][0]["round"] == 2


def test_a_program_that_is_not_the_same_twice_is_not_decided(tmp_path, run_warm_compiler):
    done, report = compare(tmp_path, run_warm_compiler, ANEW)
    assert (done.status, report["verdict"]) == (1, "undecided")
    assert "two runs of eager code differ" in done.stdout


@each(
    ("words", "said"),
    [
        (("train.py",), "compiles nothing"),
        (("--rounds", "0", "train.py"), "--rounds"),
        (("-",), "standard input"),
        (("missing.py",), "missing.py"),
    ],
)
def test_wrong_use_is_one_sentence(tmp_path, run_gradsan, run_warm_search, words, said):
    (tmp_path / "train.py").write_text("import torch\ntorch.ones(2, requires_grad=True).sum().backward()\n")
    # The first of them runs the program; the others are started as users start it.
    run = run_warm_search if words == ("train.py",) else run_gradsan
    done = run("compare", *words, cwd=tmp_path)
    assert (done.status, done.stdout) == (2, "")
    assert said in done.stderr
    assert "Traceback" not in done.stderr
