"""Suggested lines: that they read as expected, parse, run, and compute the same forward values."""

from __future__ import annotations

import ast
import textwrap

import pytest
from source_snippets import run_with_fakes, run_with_torch, without_columns

from cases import each
from gradsan.model import Frame
from gradsan.source import (
    Change,
    apply_change,
    changed_lines,
    clone_at_save,
    clone_before,
    detach_at,
    drop_keyword,
    inplace_false,
)
from gradsan.source.rewrite.detached import detach_reads
from gradsan.source.rewrite.out_of_place import out_of_place

HEAD = """
import torch
import torch.nn.functional as F
from torch import nn
torch.manual_seed(0)
x, y, v = torch.rand(3, 3) + 1, torch.rand(3, 3) + 1, torch.rand(3, 3) + 1
class Box: pass
box = Box(); box.h = torch.rand(3, 3)
d = {'k': torch.rand(3, 3)}
"""
# (program, operation, the changed line as it should read). "#!" marks the line where there are several.
OUT_OF_PLACE = [
    ("x += y", "__iadd__", "x = x + y"),
    ("x -= y - v", "__isub__", "x = x - (y - v)"),
    ("x -= y * v", "__isub__", "x = x - y * v"),
    ("x *= y + v", "__imul__", "x = x * (y + v)"),
    ("x *= (y + v)", "__imul__", "x = x * (y + v)"),
    ("x *= (y) + (v)", "__imul__", "x = x * ((y) + (v))"),
    ("x /= -y", "__itruediv__", "x = x / -y"),
    ("x //= y", "__ifloordiv__", "x = x // y"),
    ("x %= y", "__imod__", "x = x % y"),
    ("x **= 2 ** 0.5", "__ipow__", "x = x ** (2 ** 0.5)"),
    ("x **= -y", "__ipow__", "x = x ** -y"),
    ("x += y if True else v", "__iadd__", "x = x + (y if True else v)"),
    ("b = x > 1.5\nb &= y > 1.5", "__iand__", "b = b & (y > 1.5)"),
    ("b = x > 1.5\nb |= y > 1.5", "__ior__", "b = b | (y > 1.5)"),
    ("b = x > 1.5\nb ^= y > 1.5", "__ixor__", "b = b ^ (y > 1.5)"),
    ("n = x.long()\nn <<= 2", "__ilshift__", "n = n << 2"),
    ("n = x.long()\nn >>= 1", "__irshift__", "n = n >> 1"),
    ("box.h += y", "__iadd__", "box.h = box.h + y"),
    ("z = x.detach().sub_(y).abs_().max()", "sub_", "z = x.detach().sub(y).abs().max()"),
    ("d['k'] *= y", "__imul__", "d['k'] = d['k'] * y"),
    ("if True: x += y  # stays", "__iadd__", "if True: x = x + y  # stays"),
    ("if True:\n\tx += y", "__iadd__", "\tx = x + y"),
    (
        "q = [x + 1, y + 1]\ntorch._foreach_mul_(q, 2.0)\nz = q[0] + q[0]",
        "_foreach_mul_",
        "q = torch._foreach_mul(q, 2.0)",
    ),
    ("x.add_(y)", "add_", "x = x.add(y)"),
    ("x.sub_(x.mean(0)).div_(x.std(0))", "div_", "x = x.sub(x.mean(0))\nx = x.div(x.std(0))"),
    ("x.add_(y, alpha=2)  # note", "add_", "x = x.add(y, alpha=2)  # note"),
    ("x.mul_(2).sigmoid_()", "mul_", "x = x.mul(2).sigmoid()"),
    ("y = torch.exp(x).mul_(v)", "mul_", "y = torch.exp(x).mul(v)"),
    ("y = v + F.softmax(x, 0).mul_(2).add_(1).log()", "add_", "y = v + F.softmax(x, 0).mul(2).add(1).log()"),
    ("y = (x * v).tanh().neg_()", "neg_", "y = (x * v).tanh().neg()"),
    ("y = (x - v).abs_()", "abs_", "y = (x - v).abs()"),
    ("x.mul_(2).sigmoid_()", "sigmoid_", "x = x.mul(2).sigmoid()"),
    ("(x\n .mul_(2)\n .sigmoid_())", "mul_", "x = (x\n .mul(2)\n .sigmoid())"),
    ("x = x.clamp_(min=1.2)", "clamp_", "x = x.clamp(min=1.2)"),
    ("z = x.add_(1)\nw = x + z", "add_", "z = x = x.add(1)"),
    ("z = x.add_(1)", "add_", "z = x.add(1)"),
    (
        "def f(q):\n    if True:\n        z = q.mul_(2)  #!\n    else:\n        z = q\n    return z\nz = f(x + 1)",
        "mul_",
        "        z = q.mul(2)  #!",
    ),
    ("z = torch.exp(x.relu_() + y)\nw = x + 1", "relu_", "x = x.relu()\nz = torch.exp(x + y)"),
    ("z = y.exp() * x.relu_()\nw = x + 1", "relu_", "z = y.exp() * (x := x.relu())"),
    ("d = {'k': x.clone()}\nz = d['k'].exp_() + y\nw = d['k']", "exp_", "d['k'] = d['k'].exp()\nz = d['k'] + y"),
    ("z = box.h.exp_().sum() + y\nw = box.h", "exp_", "box.h = box.h.exp()\nz = box.h.sum() + y"),
    ("z = torch.exp(x.relu_() + y)", "relu_", "z = torch.exp(x.relu() + y)"),
    ("x.add_(1).view(-1).mul_(2)\nw = x + 1", "add_", "x = x.add(1)\nx.view(-1).mul_(2)"),
    ("box.h.zero_()", "zero_", "box.h = torch.zeros_like(box.h)"),
    ("x.fill_(-2.5)", "fill_", "x = torch.full_like(x, -2.5)"),
    ("x.fill_(y[0, 0])", "fill_", "x = torch.empty_like(x).fill_(y[0, 0])"),
    ("x.copy_(y[0])", "copy_", "x = torch.empty_like(x).copy_(y[0])"),
    ("x.normal_(0, 2)", "normal_", "x = torch.empty_like(x).normal_(0, 2)"),
    ("x.fill_diagonal_(1.0).div_(y)", "div_", "x = x.clone().fill_diagonal_(1.0).div(y)"),
    ("x.gt_(1.5)", "gt_", "x = x.clone().gt_(1.5)"),
    ("x.masked_fill_(x > 1.5, 0.0)", "masked_fill_", "x = x.masked_fill(x > 1.5, 0.0)"),
    ("x.t_()", "t_", "x = x.t()"),
    ("F.relu(x, inplace=True)", "relu_", "x = F.relu(x, inplace=False)"),
    ("x = F.relu(x, inplace=True)", "relu_", "x = F.relu(x, inplace=False)"),
    ("z = F.relu(x, inplace=True)", "relu_", "z = F.relu(x, inplace=False)"),
    ("z = F.relu(x, inplace=True)\nw = z + x", "relu_", "z = x = F.relu(x, inplace=False)"),
    ("F.relu(x, inplace=True).mul_(2)", "mul_", "x = F.relu(x, inplace=False).mul(2)"),
    ("torch.relu_(x)", "relu_", "x = torch.relu(x)"),
    ("buf = torch.empty(3, 3)\ntorch.add(x, y, out=buf)", "add", "buf = torch.add(x, y)"),
    ("buf = torch.empty(3, 3)\nz = torch.add(x, y, out=buf)\nw = buf + z", "add", "z = buf = torch.add(x, y)"),
    ("def f(q):\n    q.mul_(2)  #!\n    return q\nz = f(x.clone())", "mul_", "    q = q.mul(2)  #!"),
    ("def f(q):\n    return q.mul_(2)  #!\nz = f(x.clone())", "mul_", "    return q.mul(2)  #!"),
    ("z = 0\nfor i in range(3):\n    z = x.mul_(2) + z  #!", "mul_", "    x = x.mul(2)\n    z = x + z  #!"),
    ("z = [q.mul_(2) for q in (x.clone(), y.clone())]", "mul_", "z = [q.mul(2) for q in (x.clone(), y.clone())]"),
]
NOT_OUT_OF_PLACE = [
    ("x.detach().abs_()", "abs_"),
    ("z = x.data.abs_().max()", "abs_"),
    ("x[0] = v[0]", "__setitem__"),
    ("x[0] += v[0]", "__iadd__"),
    ("x[:, 0].mul_(2)", "mul_"),
    ("x.data.mul_(2)", "mul_"),
    ("x.view(-1).mul_(2)", "mul_"),
    ("def sign(q): return q\nv = sign(x).mul_(2)", "mul_"),
    ("v = (+x).mul_(2)", "mul_"),
    ("x.resize_(3, 3)", "resize_"),
    ("w = nn.Linear(3, 3)\nnn.init.zeros_(w.weight)", "zero_"),
    ("def f():\n    x.mul_(2)  #!\nf()", "mul_"),
    ("z = (lambda q: q.mul_(2) + q)(x)", "mul_"),
    ("[q.mul_(2) for q in (x, y)]", "mul_"),
    ("class M(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
     "        self.u, self.w = 1, nn.Parameter(v)\n    def go(self):\n"
     "        with torch.no_grad(): self.w.mul_(2)  #!\nM().go()", "mul_"),
    ("class E(nn.Embedding):\n    def go(self):\n"
     "        with torch.no_grad(): self.weight.mul_(2)  #!\nE(3, 3).go()", "mul_"),
    ("w = Box(); w.lin = nn.Linear(3, 3)\nwith torch.no_grad(): w.lin.weight.mul_(2)", "mul_"),
    ("z = x + x.mul_(2)\nw = x + z", "mul_"),
    ("torch._foreach_mul_([x, y], 2.0)", "_foreach_mul_"),
]  # fmt: skip


def _marked(text: str) -> int:
    lines = text.splitlines()
    return next((number for number, line in enumerate(lines, 1) if "#!" in line), 0)


def _frame_on(ran, line: int) -> Frame:
    return next(frame for _, frame in ran.events if frame.line == line)


def _results(ran) -> dict[str, object]:
    import torch

    found = {name: value for name, value in ran.names.items() if isinstance(value, torch.Tensor)}
    found |= {"box.h": ran.names["box"].h, "d['k']": ran.names["d"]["k"]}
    if isinstance(ran.names.get("z"), list):
        found |= {f"z{index}": value for index, value in enumerate(ran.names["z"])}
    return found


def _place_of(text: str, op: str, body: str) -> int:
    """The line of the program on which the operation is asked about: the marked one, else the first that has it."""
    if marked := _marked(text):
        return marked
    names = [
        "iadd",
        "isub",
        "imul",
        "itruediv",
        "ifloordiv",
        "imod",
        "ipow",
        "iand",
        "ior",
        "ixor",
        "ilshift",
        "irshift",
    ]
    operators = dict(
        zip(names, ["+=", "-=", "*=", "/=", "//=", "%=", "**=", "&=", "|=", "^=", "<<=", ">>="], strict=True)
    )
    sign = operators.get(op.strip("_"), "out=" if op == "add" else op.rstrip("_") if op == "relu_" else op)
    start = text.count("\n") - body.count("\n")
    return next(number for number, line in enumerate(text.splitlines(), 1) if number >= start and sign in line)


@each(("body", "op", "expected"), OUT_OF_PLACE, ids=[case[0] for case in OUT_OF_PLACE])
def test_out_of_place_reads_runs_and_computes_the_same(tmp_path, body, op, expected):
    torch = pytest.importorskip("torch")
    ran = run_with_torch(tmp_path, HEAD + body)
    line = _place_of(ran.text, op, body)
    frames = [frame for _, frame in ran.events if frame.line == line]
    by_line = Frame(ran.file, line, frames[-1].function)
    changes = {change for frame in frames if frame.column and (change := out_of_place(frame, op))}
    changes |= {out_of_place(by_line, op)}
    assert len(changes) == 1
    change = changes.pop()
    assert isinstance(change, Change)
    assert change.new == expected
    assert change.kind == "out_of_place"
    again = run_with_torch(tmp_path, apply_change(ran.text, change))
    before, after = _results(ran), _results(again)
    replaced = {"x"} if body.startswith("z = ") and "w = " not in body and "for" not in body else set()
    for name in before.keys() - replaced:
        assert torch.equal(before[name], after[name]), name
        assert before[name].dtype == after[name].dtype


@each(("body", "op"), NOT_OUT_OF_PLACE, ids=[case[0] for case in NOT_OUT_OF_PLACE])
def test_no_line_where_none_says_the_same(tmp_path, body, op):
    pytest.importorskip("torch")
    ran = run_with_torch(tmp_path, HEAD + body)
    line = _marked(ran.text) or next(
        number for number, text in enumerate(ran.text.splitlines(), 1) if text == body.splitlines()[-1]
    )
    frames = [frame for _, frame in ran.events if frame.line in (line, line - 1)]
    assert frames
    for frame in frames:
        assert out_of_place(frame, op) is None
        assert out_of_place(without_columns(frame), op) is None


@each(
    ("text", "notes"),
    [
        ("def f(q):\n    q.mul_(2)  #!\nf(x)", ("parameter_not_returned",)),
        ("def f(q):\n    q.mul_(2)  #!\n    return q + 1\nf(x)", ("parameter_not_returned",)),
        ("def f(q):\n    q.mul_(2)  #!\n    return q, 1\nz = f(x)", ()),
        ("def f(q):\n    q.mul_(2)  #!\n    return q.view(-1)\nx = f(x)\nx.sum()", ()),
        ("def f(q):\n    q.mul_(2)  #!\n    return q, 1\ndef g(a):\n    a, n = f(a)\n    return a.sum()\ng(x)", ()),
        ("def f(q):\n    q.mul_(2)  #!\n    return q\nf(x)", ("parameter_not_returned",)),
        ("def f(q):\n    q.mul_(2)  #!\n    return q\nz = f(x)\nx.sum()", ("parameter_not_returned",)),
        ("for q in (x, y):\n    q.mul_(2)  #!", ("loop_variable",)),
        ("q = x\nq.mul_(2)  #!\nx.sum()", ("aliased",)),
        ("q = x\nq.mul_(2)  #!\nq.sum()", ()),
        ("q = getattr(x, 'h')\nq.mul_(2)  #!\nq.sum()", ("aliased",)),
        ("q = {'h': x}.get('h')\nq.mul_(2)  #!", ("aliased",)),
        ("q = x + y\nr = q[:, 0]\nq.mul_(2)  #!\nr.sum()", ("aliased",)),
        ("q = x + y\nr = q[:, 0]\ns = r + 1\nq.mul_(2)  #!", ()),
        ("q = x + y\nr = q[:, 0]\nfor i in range(2):\n    s = r + 1\n    q.mul_(2)  #!", ("aliased",)),
        ("def f(q):\n    q = q + 1\n    q.mul_(2)  #!\n    return q + 1\nf(x)", ()),
        ("q = x + y\nq.mul_(2)  #!", ()),
        ("x.h.mul_(2)  #!", ()),
    ],
)
def test_notes_say_who_keeps_the_old_value(tmp_path, text, notes):
    ran = run_with_fakes(tmp_path, text)
    change = out_of_place(ran.frame("mul_"), "mul_")
    assert change.notes == notes
    assert clone_before(without_columns(ran.frame("mul_")), "mul_").notes == notes


@each(
    ("body", "op", "line", "new"),
    [
        ("x[0] = v[0]", "__setitem__", "x = x.clone()", True),
        ("q = [x + 1, y + 1]\ntorch._foreach_mul_(q, 2.0)", "_foreach_mul_", "q = [t.clone() for t in q]", True),
        ("box.h[0] = v[0]", "__setitem__", "box.h = box.h.clone()", True),
        ("d['k'][0] = v[0]", "__setitem__", "d['k'] = d['k'].clone()", True),
        ("if True:\n    x[:, 0].mul_(2)", "mul_", "    x = x.clone()", True),
        ("if True: x.mul_(2)", "mul_", "if True: x = x.clone(); x.mul_(2)", False),
        ("y.sum(); x.mul_(2)", "mul_", "y.sum(); x = x.clone(); x.mul_(2)", False),
        ("for i in range(2):\n\tx[i] += v[i]", "__setitem__", "\tx = x.clone()", True),
        ("with torch.no_grad():\n    x.data.mul_(2)", "mul_", "    x = x.clone()", True),
    ],
)
def test_clone_before(tmp_path, body, op, line, new):
    torch = pytest.importorskip("torch")
    ran = run_with_torch(tmp_path, HEAD + body)
    frame = Frame(ran.file, ran.text.count("\n"), "<module>")
    change = clone_before(frame, op)
    assert (change.new, change.old == "", change.kind) == (line, new, "clone_before")
    if new:
        assert change.line == frame.line
    again = run_with_torch(tmp_path, apply_change(ran.text, change))
    for name, value in _results(ran).items():
        assert torch.equal(value, _results(again)[name])


@each(
    ("body", "line"),
    [
        ("z = y\nz[0] = v[0]", "z = y.clone()"),
        ("x.h = y\nz = x.h\n\nz[0] = v[0]", "z = x.h.clone()"),
        ("z = y * 1\nz[0] = v[0]", "z = z.clone()"),
        ("z = y\nw = z\nz[0] = v[0]", "z = z.clone()"),
    ],
)
def test_a_second_name_made_right_before_the_write_is_made_of_a_copy(tmp_path, body, line):
    ran = run_with_fakes(tmp_path, body)
    assert clone_before(Frame(ran.file, ran.text.count("\n"), "<module>"), "__setitem__").new == line


@each(
    ("text", "op"),
    [
        ("while x.add_(1) is None: pass", "add_"),
        ("if not x: pass\nelif x.add_(1) is None: pass", "add_"),
        ("[q.add_(1) for q in (x, y)]", "add_"),
        ("xs = [x]\nxs[0].add_(1)", "add_"),
        ("f(x).add_(1)", "add_"),
    ],
)
def test_no_clone_before_where_there_is_no_place_or_name(tmp_path, text, op):
    ran = run_with_fakes(tmp_path, text)
    assert clone_before(Frame(ran.file, ran.text.count("\n"), "<module>"), op) is None


@each(
    ("text", "name", "shape", "new"),
    [
        ("h = h_next", "h", "tensor", "h = h_next.detach()"),
        ("    h = h_next  # carry", "h", "tensor", "    h = h_next.detach()  # carry"),
        ("h = a + b", "h", "tensor", "h = (a + b).detach()"),
        ("h = (a + b)", "h", "tensor", "h = (a + b).detach()"),
        ("h = (a) + (b)", "h", "tensor", "h = ((a) + (b)).detach()"),
        ("h = -a", "h", "tensor", "h = (-a).detach()"),
        ("h = a if b else c", "h", "tensor", "h = (a if b else c).detach()"),
        ("h = f(a)[0]", "h", "tensor", "h = f(a)[0].detach()"),
        ("self.bank = self.m * self.bank + x", "self.bank", "tensor", "self.bank = (self.m * self.bank + x).detach()"),
        ("h = (\n    a\n    + b\n)", "h", "tensor", ").detach()"),
        ("h: T = a", "h", "tensor", "h: T = a.detach()"),
        ("state = new", "state", "tuple", "state = tuple(s.detach() for s in new)"),
        ("state = (h, c)", "state", "tuple", "state = (h.detach(), c.detach())"),
        ("state = [h, c]", "state", "list", "state = [h.detach(), c.detach()]"),
        ("state = new", "state", "dict", "state = {key: s.detach() for key, s in new.items()}"),
        ("state = h, (a + b, [c])", "state", None, "state = h.detach(), ((a + b).detach(), [c.detach()])"),
        ("state = {'h': h, 'c': c}", "state", None, "state = {'h': h.detach(), 'c': c.detach()}"),
        ("state = (*hs, c)", "state", "tuple", "state = tuple(s.detach() for s in (*hs, c))"),
        ("prev, cur = cur, nxt", "prev", "tensor", "prev, cur = cur.detach(), nxt"),
        ("total += loss", "total", "tensor", "total += loss.detach()"),
        ("total += a * b", "total", "tensor", "total += (a * b).detach()"),
        ("hs.append(h)", "hs", "tensor", "hs.append(h.detach())"),
        ("hs.append(a + b)", "hs", "tensor", "hs.append((a + b).detach())"),
        ("mem[i] = v", "mem", "tensor", "mem[i] = v.detach()"),
        ("mem[i] = h[j]", "mem", "dict", "mem[i] = h[j].detach()"),
        ("mem[i] = hc", "mem", "dict/tuple", "mem[i] = tuple(s.detach() for s in hc)"),
        ("mem.copy_(v)", "mem", "tensor", "mem.copy_(v.detach())"),
        ("while (h := f(h)) is not None: pass", "h", "tensor", "while (h := f(h).detach()) is not None: pass"),
        # A line of its own after the statement:
        ("seq, state = lstm(x, state)", "state", "tuple", "+state = tuple(s.detach() for s in state)"),
        ("    seq, self.h = rnn(x)", "self.h", "tensor", "+    self.h = self.h.detach()"),
        ("a = h = f(x)", "h", "tensor", "+h = h.detach()"),
        ("h *= x", "h", "tensor", "+h = h.detach()"),
        ("h.mul_(x)", "h", "tensor", "+h = h.detach()"),
        ("if x: seq, h = f(h)", "h", "tensor", "if x: seq, h = f(h); h = h.detach()"),
        ("seq, h = f(h); g(h)", "h", "tensor", "seq, h = f(h); h = h.detach(); g(h)"),
        ("seq, h = f(\n    h)  # x", "h", "tensor", "+h = h.detach()"),
        # Nothing to say:
        ("h = a.detach()", "h", "tensor", None),
        ("for h in hs: pass", "h", "tensor", None),
        ("hs.extend(h)", "hs", "tensor", None),
        ("a = 1", "h", "tensor", None),
        ("h = a; h = b", "h", "tensor", None),
    ],
)
def test_detach(tmp_path, text, name, shape, new):
    is_indented = text.startswith(" ")
    text = ("if True:\n" if is_indented else "") + text + "\n"
    path = tmp_path / "detach.py"
    path.write_text(text)
    frame = Frame(str(path), 2 if is_indented else 1, "<module>")
    change = detach_at(frame, name, shape)
    if new is None:
        assert change is None
        return
    assert ("+" if change.old == "" else "") + change.new == new
    ast.parse(apply_change(text, change))


@each(
    ("text", "name", "new"),
    [
        ("state = (a, b)\nseq, state = f(x, state)", "state", "state = tuple(s.detach() for s in state)"),
        ("state = []\nseq, state = f(x, state)", "state", "state = [s.detach() for s in state]"),
        ("state = {}\nstate = f(x, state)", "state", "state = {key: s.detach() for key, s in f(x, state).items()}"),
        ("hx, cx = state\nstate = f(x)", "state", "state = tuple(s.detach() for s in f(x))"),
        ("rnn = nn.LSTM(3, 4)\nseq, state = rnn(x, state)", "state", "state = tuple(s.detach() for s in state)"),
        ("rnn = nn.GRU(3, 4)\nseq, state = rnn(x, state)", "state", "state = state.detach()"),
        (
            "cell = nn.LSTMCell(3, 4)\nstate = cell(x, state)",
            "state",
            "state = tuple(s.detach() for s in cell(x, state))",
        ),
        ("state = None\nseq, state = f(x, state)", "state", "state = state.detach()"),
        ("state = (a, b)\nstate = [a]\nseq, state = f(x, state)", "state", "state = state.detach()"),
        ("ps = []\nps = torch.stack(ps)", "ps", "ps = torch.stack(ps).detach()"),
        ("ps = []\nps = 2 * torch.cat(ps).view(-1)[1:]", "ps", "ps = (2 * torch.cat(ps).view(-1)[1:]).detach()"),
        ("ps = []\nps = list(map(f, ps))", "ps", "ps = [s.detach() for s in list(map(f, ps))]"),
        ("ps = []\nps = torch.stack(ps).split(2)", "ps", "ps = [s.detach() for s in torch.stack(ps).split(2)]"),
        (
            "class A:\n    def __init__(self): self.rnn, self.h = nn.LSTM(3, 4), None\n"
            "    def forward(self, x): y, self.h = self.rnn(x, self.h)",
            "self.h",
            "    def forward(self, x): y, self.h = self.rnn(x, self.h); self.h = tuple(s.detach() for s in self.h)",
        ),
    ],
)
def test_detach_finds_out_the_shape(tmp_path, text, name, new):
    path = tmp_path / "shape.py"
    path.write_text(text + "\n")
    scope = "forward" if "forward" in text else "<module>"
    assert detach_at(Frame(str(path), text.count("\n") + 1, scope), name).new == new


@each(
    ("text", "name", "new"),
    [
        ("y = x * w", "x", "y = x.clone() * w"),
        ("y = x * x", "x", "y = x.clone() * x.clone()"),
        ("y = f(self.h, x)", "self.h", "y = f(self.h.clone(), x)"),
        ("y = x.mul(w)", "x", "y = x.clone().mul(w)"),
        ("y = f(x[0], x.shape)", "x", "y = f(x.clone()[0], x.shape)"),
        ("y = f(xs[0])", "xs[0]", "y = f(xs[0].clone())"),
        ("y = f(xs[i])", "xs[i]", "y = f(xs[i].clone())"),
        ("y = torch.sigmoid(x)", "y", "y = torch.sigmoid(x).clone()"),
        ("x = a @ b", "x", "x = (a @ b).clone()"),
        ("ctx.x = x.detach().numpy()", "ctx.x", "ctx.x = x.detach().numpy().copy()"),
        ("y, z = f(x)", "y", "+y = y.clone()"),
        ("return_ = f(x)", "w", None),
        ("y = self.act(x)", "self.act", None),
    ],
)
def test_clone_at_save(tmp_path, text, name, new):
    path = tmp_path / "save.py"
    path.write_text(text + "\n")
    change = clone_at_save(Frame(str(path), 1, "<module>"), name)
    assert (None if change is None else ("+" if not change.old else "") + change.new) == new


@each(
    ("text", "new"),
    [
        ("loss.backward(retain_graph=True)", "loss.backward()"),
        ("loss.backward(None, retain_graph=True)", "loss.backward(None)"),
        ("loss.backward(retain_graph=True, create_graph=False)", "loss.backward(create_graph=False)"),
        ("loss.backward(None, retain_graph=(a, 'b, c')[0], inputs=[p, q])", "loss.backward(None, inputs=[p, q])"),
        ("(l1 + l2(a, b)).backward((x), retain_graph=True,)", "(l1 + l2(a, b)).backward((x),)"),
        ("loss.backward(\n    gradient=g,  # why\n    retain_graph=True,\n)", "loss.backward(\n    gradient=g,\n)"),
        ("loss.backward(retain_graph=True,)", "loss.backward()"),
        ("loss.backward()", None),
        ("a.backward(retain_graph=True); b.backward(retain_graph=True)", None),
        ("loss.backward(**options)", None),
    ],
)
def test_drop_keyword(tmp_path, text, new):
    path = tmp_path / "keyword.py"
    path.write_text(text + "\n")
    change = drop_keyword(Frame(str(path), 1, "<module>"), "retain_graph")
    if new is None:
        assert change is None
        return
    changed = apply_change(text, change)
    assert ast.dump(ast.parse(changed)) == ast.dump(ast.parse(new))
    assert changed == new or "#" in text


MODULES = """
class Block(nn.Module):
    def __init__(self):
        self.relu = nn.ReLU(inplace=True)
        self.act = nn.SiLU(True)
        self.body = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True))
        self.two = nn.Sequential(nn.ReLU(inplace=True), nn.ReLU(inplace=True))
    def forward(self, x):
        x = F.relu(x, inplace=True)
        x = self.relu(x)
        x = self.act(x)
        x = self.body[1](x)
        x = self.two[0](x)
        F.relu(x, inplace=True)
        self.act(x)
        x = F.elu(x, 1.0, inplace=self.lean)
        return self.unknown(x)
"""


def test_inplace_false_at_the_call_or_where_the_module_is_made(tmp_path):
    path = tmp_path / "block.py"
    path.write_text(MODULES)
    lines = MODULES.split("\n")
    found = {}
    for number, line in enumerate(lines, 1):
        if line.strip().startswith(("x =", "return", "F.", "self.")) and number > 8:
            change = inplace_false(Frame(str(path), number, "forward"))
            found[line.strip()] = None if change is None else (change.line, change.new.strip().split("\n")[-1].strip())
    assert found == {
        "x = F.relu(x, inplace=True)": (9, "x = F.relu(x, inplace=False)"),
        "x = self.relu(x)": (4, "self.relu = nn.ReLU(inplace=False)"),
        "x = self.act(x)": (5, "self.act = nn.SiLU(False)"),
        "x = self.body[1](x)": (6, "self.body = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=False))"),
        "x = self.two[0](x)": (7, "self.two = nn.Sequential(nn.ReLU(inplace=False), nn.ReLU(inplace=True))"),
        "x = F.elu(x, 1.0, inplace=self.lean)": (16, "x = F.elu(x, 1.0, inplace=False)"),
        "return self.unknown(x)": None,
        # What nobody takes would be lost: the name is bound to it.
        "F.relu(x, inplace=True)": (14, "x = F.relu(x, inplace=False)"),
        "self.act(x)": (5, "x = self.act(x)"),
    }


def test_a_change_of_other_text_is_refused():
    change = Change(2, "x += y", "x = x + y", "out_of_place")
    assert apply_change("a\nx += y\nb", change) == "a\nx = x + y\nb"
    with pytest.raises(ValueError, match="line 2"):
        apply_change("a\nz += y\nb", change)


def test_changed_lines_replace_single_lines(tmp_path):
    path = tmp_path / "lines.py"
    path.write_text("seq, h = f(\n    h)\nx.backward(a,\n  retain_graph=True)\ns, h = f(h)")
    added = detach_at(Frame(str(path), 1, "<module>"), "h")
    assert changed_lines(str(path), added) == ((str(path), 3, "h = h.detach()\nx.backward(a,"),)
    joined = drop_keyword(Frame(str(path), 3, "<module>"), "retain_graph")
    assert changed_lines(str(path), joined) == ((str(path), 3, "x.backward(a)"), (str(path), 4, ""))
    at_end = detach_at(Frame(str(path), 5, "<module>"), "h")
    assert changed_lines(str(path), at_end) == ((str(path), 5, "s, h = f(h)\nh = h.detach()"),)
    path.write_text("something else\n" * 5)
    assert changed_lines(str(path), joined) == ()


def test_nothing_is_suggested_without_source():
    frame = Frame("<string>", 1, "f", 1, 1, 5)
    results = [out_of_place(frame, "add_"), clone_before(frame, "add_"), clone_at_save(frame, "x")]
    assert [*results, detach_at(frame, "x"), drop_keyword(frame, "x"), inplace_false(frame)] == [None] * 6


def test_tables_of_names_fit_the_installed_torch():
    torch = pytest.importorskip("torch")
    from gradsan.source import methods

    in_place = [name for name in dir(torch.Tensor) if methods.is_inplace_name(name) and not name.startswith("_")]
    assert set(in_place) <= methods.INPLACE_METHODS
    special = methods.OVERWRITING | methods.WITHOUT_COUNTERPART | methods.CHANGING_METADATA
    assert [name for name in in_place if name not in special and not hasattr(torch.Tensor, name[:-1])] == []
    changes_dtype = []
    for name in in_place:
        if name not in special and hasattr(torch.Tensor, name[:-1]):
            for arguments in ((), (torch.rand(2, 2),), (1,)):
                try:
                    result = getattr(torch.rand(2, 2), name[:-1])(*arguments)
                    getattr(torch.rand(2, 2), name)(*arguments)
                except (RuntimeError, TypeError, IndexError):
                    continue
                if result.dtype != torch.float32:
                    changes_dtype.append(name)
    assert changes_dtype == []
    functions = {"view_as_complex", "view_as_real", "__array__", "__dlpack__"}
    assert [name for name in methods.ALIASING_METHODS | methods.PIECES if not hasattr(torch.Tensor, name)] in (
        [],
        [name for name in methods.ALIASING_METHODS if name in functions and not hasattr(torch.Tensor, name)],
    )
    assert [name for name in methods.METADATA | methods.CUTTING if not hasattr(torch.Tensor, name)] == []
    assert [name for name in methods.LIST_ADDS if hasattr(torch.Tensor, name)] == []


def test_indentation_and_text_around_are_kept(tmp_path):
    text = textwrap.dedent(
        """
        class A:
        \tdef go(self, q):
        \t\tself.h += q ; q.add_(1)  # both
        """
    )
    path = tmp_path / "tabs.py"
    path.write_text(text)
    change = out_of_place(Frame(str(path), 4, "go"), "add_")
    assert change is None
    column = text.splitlines()[3].index("q.add_") + 1
    change = out_of_place(Frame(str(path), 4, "go", column, 4, column + len("q.add_(1)")), "add_")
    assert change.new == "\t\tself.h += q ; q = q.add(1)  # both"
    assert change.notes == ("parameter_not_returned",)


def test_what_a_function_differentiates_is_not_read_detached(tmp_path):
    path = tmp_path / "penalty.py"
    path.write_text(
        "def penalty(critic, mixed, fake):\n"
        "    score = critic(mixed)\n"
        "    (slope,) = torch.autograd.grad(score, mixed, torch.ones_like(score), create_graph=True)\n"
        "    return slope.norm() + critic(fake).mean()\n"
    )
    call, last = Frame(str(path), 2, "penalty", 13, 2, 26), Frame(str(path), 4, "penalty", 27, 4, 39)
    assert detach_reads([call], ["mixed"]) is None
    detached = changed_lines(str(path), detach_reads([last], ["fake"]))
    assert detached == ((str(path), 4, "    return slope.norm() + critic(fake.detach()).mean()"),)


def test_a_collective_gets_a_copy(tmp_path):
    file = tmp_path / "main.py"
    file.write_text("import torch.distributed as dist\ndef share(x):\n    dist.all_reduce(x)\n    return x\n")
    frame = Frame(str(file), 3, "share")
    assert clone_before(frame, "all_reduce").new == "    x = x.clone()"
    assert out_of_place(frame, "all_reduce") is None
