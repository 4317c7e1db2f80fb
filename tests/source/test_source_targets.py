"""Targets, calls and operands of an operation, from frames of programs that ran."""

from __future__ import annotations

import pytest
from source_snippets import HAS_COLUMNS, run_with_fakes, run_with_torch, without_columns

from cases import each
from gradsan.model import Frame
from gradsan.source import called_expression, expression_at, expressions_at, operand_expressions, written_expression

# (snippet, operation, what it wrote, whether the line alone tells as much)
WRITTEN = [
    ("x += y", "__iadd__", "x", True),
    ("x -= y", "__isub__", "x", True),
    ("x *= y", "__imul__", "x", True),
    ("x /= y", "__itruediv__", "x", True),
    ("x //= y", "__ifloordiv__", "x", True),
    ("x **= y", "__ipow__", "x", True),
    ("x &= y", "__iand__", "x", True),
    ("x.h += y", "__iadd__", "x.h", True),
    ("x.h.data *= y", "__imul__", "x.h", True),
    ("x[:, 0] *= y", "__imul__", "x", True),
    ("x[i] += y", "__setitem__", "x", True),
    ("x[i] += y", "__iadd__", "x[i]", True),
    ("x[i] = y", "__setitem__", "x", True),
    ("x.h[i, 1] = y", "__setitem__", "x.h", True),
    ("x[:, 0][i] = y", "__setitem__", "x", True),
    ("x.view(-1)[0] = y", "__setitem__", "x", True),
    ("d = {'k': x}\nd['k'][i] = y", "__setitem__", "d['k']", True),
    ("d = {'k': x}\nd['k'].add_(1)", "add_", "d['k']", True),
    ("x.clamp_(max=5)", "clamp_", "x", True),
    ("adj.div_(a).div_(b)", "div_", "adj", True),
    ("y = (\n    x.view(-1)\n    .mul_(2)\n    .add_(\n        1\n    )\n)", "add_", "x", True),
    ("x[:, 0].mul_(2)", "mul_", "x", True),
    ("x[..., 1:].mul_(2)", "mul_", "x", True),
    ("x.data.add_(y)", "add_", "x", True),
    ("x.detach().mul_(2)", "mul_", "x", True),
    ("x.T.mul_(2)", "mul_", "x", True),
    ("x.chunk(2)[0].mul_(2)", "mul_", "x", True),
    ("xs = [x, y]\nxs[0].mul_(2)", "mul_", "xs[0]", True),
    ("xs = [x, y]\nk = 1\nxs[k].data.mul_(2)", "mul_", "xs[k]", True),
    ("x.grad.zero_()", "zero_", "x.grad", True),
    ("x.grad.data.zero_()", "zero_", "x.grad", True),
    ("x.clone().mul_(2)", "mul_", None, True),
    ("(x + y).mul_(2)", "mul_", None, True),
    ("f(x).mul_(2)", "mul_", None, True),
    ("(q := x.clone()).mul_(2)", "mul_", "q", True),
    ("for q in (x, y):\n    q.add_(1)", "add_", "q", True),
    ("[q.add_(1) for q in (x, y)]", "add_", "q", True),
    ("(lambda q: q.add_(1))(x)", "add_", "q", True),
    ("for x[i] in (1, 2): pass", "__setitem__", "x", True),
    ("x.__setitem__(0, y)", "__setitem__", "x", True),
    ("import operator\noperator.iadd(x, y)", "__iadd__", "x", True),
    ("add_ = x.add_\nadd_(y)", "add_", None, True),
    ("x.add_(1); y.add_(1)", "add_", "x", False),
    ("x.add_(1); y.mul_(1)", "mul_", "y", True),
    ("ä = x; ä.add_(1)", "add_", "ä", True),
    ("if i:\n\tx.add_(1)", "add_", "x", True),
    ("assert x.add_(1)", "add_", "x", True),
    ("print(f'{x.add_(1)!r:.0}', end='')", "add_", "x", True),
    ("x.subtract_(1)", "subtract_", "x", True),
    ("x.data = y", "data =", "x", True),
]
TORCH = """
    import torch
    import torch.nn.functional as F
    from torch import nn
    from torch.nn import init
    torch.manual_seed(0)
    x, y = torch.randn(3, 4), torch.randn(3, 4)
"""
WRITTEN_WITH_TORCH = [
    ("F.relu(x, inplace=True)", "relu_", "x"),
    ("F.relu(x + 1, inplace=True)", "relu_", None),
    ("F.relu(input=x, inplace=True)", "relu_", "x"),
    ("F.relu_(x)", "relu_", "x"),
    ("torch.relu_(x)", "relu_", "x"),
    ("torch.relu_(x[:, 1])", "relu_", "x"),
    ("F.dropout(x, 0.5, inplace=True)", "dropout_", "x"),
    ("torch.Tensor.add_(x, y)", "add_", "x"),
    ("buf = torch.empty(3, 4)\ntorch.add(x, y, out=buf)", "add", "buf"),
    ("buf = torch.empty(2, 3, 4)\ntorch.mul(x, y, out=buf[1, :])", "mul", "buf"),
    ("values, indices = torch.empty(3), torch.empty(3).long()\ntorch.max(x, 1, out=(values, indices))", "max", None),
    ("grads = [x, y]\ntorch._foreach_mul_(grads, 2.0)", "_foreach_mul_", "grads"),
    ("w = torch.empty(3, 4)\nnn.init.normal_(w)", "normal_", "w"),
    ("w = torch.empty(3, 4)\ninit.xavier_uniform_(w)", "uniform_", "w"),
    ("w = nn.Parameter(x)\nwith torch.no_grad():\n    w[1:].fill_(0.5)", "fill_", "w"),
    ("act = nn.ReLU(inplace=True)\nact(x)", "relu_", "x"),
    ("act = nn.ReLU(inplace=True)\nact(x.view(-1))", "relu_", "x"),
    ("act, bn = nn.ReLU(inplace=True), nn.BatchNorm1d(4)\nact(bn(x))", "relu_", None),
    ("net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True))\nnet(x)", "relu_", None),
    ("net = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4))\nnet[0](x)", "relu_", "x"),
    ("net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True))\nfor layer in net:\n    z = layer(x)", "relu_", None),
    ("layers = [nn.ReLU(inplace=True), nn.SiLU(inplace=True)]\nfor layer in layers:\n    layer(x)", "relu_", "x"),
    ("x[x > 0] = 0", "__setitem__", "x"),
    ("x[0] += y[1]", "add_", "x[0]"),
    ("torch.nn.utils.clip_grad_norm_(iter([x]), 1.0)", "mul_", None),
    (
        "opt = torch.optim.SGD([nn.Parameter(x)], lr=0.1)\nopt.param_groups[0]['params'][0].grad = y\nopt.step()",
        "add_",
        None,
    ),
]


def _ids(cases):
    return [f"{case[0].splitlines()[-1]}::{case[1]}" for case in cases]


@each(("text", "op", "expected", "line_tells"), WRITTEN, ids=_ids(WRITTEN))
def test_written_by_columns_and_by_line(tmp_path, text, op, expected, line_tells):
    ran = run_with_fakes(tmp_path, text)
    frame = Frame(ran.file, ran.text.count("\n"), "<module>") if op == "data =" else ran.frame(op)
    if frame.column is not None:
        assert written_expression(frame, op) == expected
    assert written_expression(without_columns(frame), op) == (expected if line_tells else None)


@each(("text", "op", "expected"), WRITTEN_WITH_TORCH, ids=_ids(WRITTEN_WITH_TORCH))
def test_written_with_torch(tmp_path, text, op, expected):
    pytest.importorskip("torch")
    ran = run_with_torch(tmp_path, _body(text))
    last = ran.text.count("\n")
    places = [frame for _, frame in ran.events if frame.line == last]
    assert places
    if HAS_COLUMNS:
        answers = {written_expression(frame, op) for frame in places} - {None}
        assert answers == ({expected} - {None})
    assert written_expression(without_columns(places[-1]), op) == expected


def test_elements_of_a_tuple_are_separated_by_column(tmp_path):
    ran = run_with_fakes(tmp_path, "x[i], x.h[j] = g()")
    if HAS_COLUMNS:
        found = [written_expression(ran.frame("__setitem__", index), "__setitem__") for index in (0, 1)]
        assert found == ["x", "x.h"]
    assert written_expression(without_columns(ran.frame("__setitem__")), "__setitem__") is None


def test_aten_names_are_understood(tmp_path):
    ran = run_with_fakes(tmp_path, "x += y\nz[0] = y\nw.clip_(1)")
    line = [without_columns(ran.frame(op)) for op in ("__iadd__", "__setitem__", "clip_")]
    assert written_expression(line[0], "aten::add_.Tensor") == "x"
    assert written_expression(line[0], "torch.Tensor.add_") == "x"
    assert written_expression(line[0], "mul_") is None
    assert written_expression(line[1], "aten.copy_.default") == "z"
    assert written_expression(line[1], "fill_") == "z"
    assert written_expression(line[2], "clamp_") == "w"


def test_inner_frames_decide_about_modules(tmp_path):
    ran = run_with_fakes(tmp_path, "y = h.block(x)")
    frame = ran.frame("block")
    modules = "/site-packages/torch/nn/modules"
    call = Frame(f"{modules}/module.py", 1, "_call_impl")
    one = Frame(f"{modules}/activation.py", 1, "forward")
    several = Frame(f"{modules}/container.py", 1, "forward")
    assert written_expression(frame, "relu_") is None
    assert written_expression(frame, "relu_", [call, one]) == "x"
    assert written_expression(frame, "relu_", [call, several, call, one]) is None
    assert written_expression(frame, "copy_", [call, one]) is None


def test_module_attributes_are_looked_up_in_their_class(tmp_path):
    pytest.importorskip("torch")
    text = """
    class Block(nn.Module):
        def __init__(self, act=None):
            super().__init__()
            self.act = act or nn.ReLU(inplace=True)
            self.body = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4))
            self.final = nn.Linear(4, 4)
        def forward(self, x):
            x = self.act(x)
            x = self.body(x)
            return self.final(x)
    Block()(x)
    """
    ran = run_with_torch(tmp_path, TORCH + text)
    by_line = {
        ran.text.splitlines()[frame.line - 1].strip(): frame for _, frame in ran.events if frame.function == "forward"
    }
    assert written_expression(by_line["x = self.act(x)"], "relu_") == "x"
    assert written_expression(by_line["x = self.body(x)"], "relu_") is None
    assert called_expression(by_line["x = self.body(x)"]) == "self.body"
    assert called_expression(by_line["return self.final(x)"]) == "self.final"


@each(
    ("text", "op", "expected"),
    [
        ("y = x * w", "__mul__", ["x", "w"]),
        ("y = x.h * f(w)", "__mul__", ["x.h"]),
        ("y = x.view(-1) @ w.T", "__matmul__", ["x", "w"]),
        ("x += y", "__iadd__", ["x", "y"]),
        ("y = -x", "__neg__", ["x"]),
        ("y = x.lerp(w, h)", "lerp", ["x", "w", "h"]),
        ("y = x.cat([a, b[0]], w=v)", "cat", ["x", "a", "b[0]", "v"]),
        ("x[i] = y", "__setitem__", ["x", "y"]),
        ("x[0], y[1] = a, b", "__setitem__", ["x", "a"]),
        ("y = x[i]", "__getitem__", ["x"]),
    ],
)
def test_operands(tmp_path, text, op, expected):
    ran = run_with_fakes(tmp_path, text)
    if HAS_COLUMNS:
        assert operand_expressions(ran.frame(op)) == expected


def test_self_and_modules_are_no_operands(tmp_path):
    ran = run_with_fakes(
        tmp_path,
        """
        import math
        class A:
            def go(self):
                return self.step(x)
            def step(self, q):
                return q.mul(1)
        A().go()
        """,
    )
    line = Frame(ran.file, 4, "go")
    assert operand_expressions(line) == ["x"] or len(expressions_at(line)) > 1


def test_expression_is_the_one_being_executed(tmp_path):
    ran = run_with_fakes(tmp_path, "y = f(x.mul(w) + g(x.mul(a)), x.mul(b))")
    if HAS_COLUMNS:
        texts = [expression_at(ran.frame("mul", index)).text for index in range(3)]
        assert texts == ["x.mul(w)", "x.mul(a)", "x.mul(b)"]
    assert expression_at(without_columns(ran.frame("mul"))) is None
    candidates = [place.text for place in expressions_at(without_columns(ran.frame("mul")))]
    assert {"x.mul(w)", "x.mul(a)", "x.mul(b)", "g(x.mul(a))"} <= set(candidates)


def test_a_callee_over_several_lines_is_written_on_one(tmp_path):
    ran = run_with_fakes(tmp_path, "y = (x\n     .view(-1)\n     .final(\n         w))")
    if HAS_COLUMNS:
        assert called_expression(ran.frame("final")) == "x.view(-1).final"


def _body(text: str) -> str:
    return "\n".join(line.strip() for line in TORCH.strip().splitlines()) + "\n" + text
