"""Operations rewritten so that they stay finite: the line that a form gives, by why the operation did not stay so."""

import ast

from cases import each
from gradsan.model import Frame
from gradsan.source import finite_forms
from gradsan.source.tree import read_source

IMPORTS = "import math\nimport torch\nfrom torch import nn\nfrom torch.nn import functional as F\n"

# (program, the operation in it, why it was not finite, {kind: a line of the result}); "" where no such form is to be.
CASES = [
    ("p = F.softmax(x, dim=-1)\nloss = -torch.log(p)", "torch.log(p)", "domain", "loss = -F.log_softmax(x, dim=-1)"),
    ("loss = x.softmax(1).log()", "x.softmax(1).log()", "domain", "loss = x.log_softmax(1)"),
    (
        "p = torch.sigmoid(z)\nloss = -(y * torch.log(p) + (1 - y) * torch.log(1 - p)).mean()",
        "torch.log(1 - p)",
        "domain",
        "loss = -(y * F.logsigmoid(z) + (1 - y) * F.logsigmoid(-z)).mean()",
    ),
    ("w = torch.exp(e)\nout = torch.log(w.sum(dim=1))", "torch.exp(e)", "overflow", "out = torch.logsumexp(e, dim=1)"),
    ("w = e.exp()\nout = w / w.sum(-1, keepdim=True)", "e.exp()", "overflow", "out = torch.softmax(e, -1)"),
    ("out = torch.log(1 + torch.exp(v))", "torch.exp(v)", "overflow", "out = F.softplus(v)"),
    (
        "s = (a - b).square().sum(dim=-1)\nr = s.sqrt()",
        "s.sqrt()",
        "infinite_derivative",
        "r = torch.linalg.vector_norm(a - b, dim=-1)",
    ),
    (
        "r = torch.where(w > 0, torch.sqrt(w), 0.0)",
        "torch.sqrt(w)",
        "zero_times_inf",
        "r = torch.where(w > 0, torch.sqrt(torch.where(w > 0, w, 1.0)), 0.0)",
    ),
    (
        "lw = torch.log(w)\nok = w > 0\nr = torch.where(ok, lw, 0.0)",
        "torch.log(w)",
        "zero_times_inf",
        "lw = torch.log(torch.where(w > 0, w, 1.0))",
    ),
    ("r = torch.log(w)[w > 0]", "torch.log(w)", "zero_times_inf", "r = torch.log(w[w > 0])"),
    ("r = (a - b) ** 0.5", "(a - b) ** 0.5", "infinite_derivative", "r = (a - b).clamp_min(1e-12) ** 0.5"),
    ("n = mask.sum(1)\nr = x / n", "x / n", "zero_division", "r = x / n.clamp_min(1)"),
    ("r = v / v.norm(dim=-1, keepdim=True)", None, "zero_division", "r = F.normalize(v, dim=-1)"),
    ("m = chosen.mean()", None, "empty", "m = (chosen.sum() / max(chosen.numel(), 1))"),
    ("s = x.std(dim=0)", None, "empty", "s = x.std(dim=0, correction=0)"),
    (
        "criterion = nn.CrossEntropyLoss()\nloss = criterion(out, y)",
        "criterion(out, y)",
        "empty",
        "loss = criterion(out, y) / (y != -100).sum().clamp_min(1)",
    ),
    (
        "s = s.masked_fill(m, -math.inf)\nw = s.softmax(-1)",
        "s.softmax(-1)",
        "all_masked",
        "s = s.masked_fill(m, torch.finfo(s.dtype).min)",
    ),
    ("m = torch.empty(3, 4)", None, "unwritten", "m = torch.zeros(3, 4)"),
]


def first_form(folder, program, operation, reason, high=None, dtype="float32"):
    file = folder / "train.py"
    file.write_text(IMPORTS + program + "\n", encoding="utf-8")
    source = read_source(str(file))
    text = operation or program.split(" = ", 1)[1]
    node = next(one for one in ast.walk(source.module) if isinstance(one, ast.expr) and source.text(one) == text)
    span = source.span(node)
    frame = Frame(str(file), span.line, "<module>", span.column, span.end_line, span.end_column, is_user=True)
    return next(iter(finite_forms(frame, reason, dtype=dtype, low=0.0, high=high)), None)


@each(("program", "operation", "reason", "line"), CASES)
def test_the_first_form(program, operation, reason, line, tmp_path):
    assert line in first_form(tmp_path, program, operation, reason).change.new.split("\n")


def test_a_cast_that_overflows_is_left_out_unless_it_moves_the_tensor_too(tmp_path):
    programs = ("h = x.half()", "h = w(x).to(torch.float16)", "h = x.to('cuda', torch.float16)")
    forms = [first_form(tmp_path, one, None, "overflow", dtype="float16") for one in programs]
    assert [form and form.change.new for form in forms] == ["h = x", "h = w(x)", None]


def test_a_sum_that_is_no_count_may_be_less_than_one(tmp_path):
    program = "n = weights.sum(1)\nr = x / n"
    lines = [first_form(tmp_path, program, "x / n", "zero_division", high).change.new for high in (3.0, 3.37)]
    assert lines == ["r = x / n.clamp_min(1)", "r = x / n.clamp_min(1e-8)"]


@each(
    "program",
    [
        "p = x.softmax(1)\nx = x + 1\nloss = torch.log(p)",  # x is another by then
        "p = x.softmax(1)\nfor i in range(3):\n    loss = torch.log(p)\n    x = x * 2",
        "for p in (x.softmax(1), y):\n    loss = torch.log(p)",
    ],
)
def test_a_name_that_may_stand_for_something_else_is_not_followed(program, tmp_path):
    assert first_form(tmp_path, program, "torch.log(p)", "domain").kind == "clamp_input"
