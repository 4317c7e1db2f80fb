"""Leaves made within an expression, bound alone: the statement, and what reads it, as they are changed."""

from __future__ import annotations

from pathlib import Path

from cases import each
from gradsan.model import Frame
from gradsan.source import leaf_alone, own_name_in_forward
from gradsan.source.change import apply_change

# (statement, the same with its leaf alone; None where it is left as it is), each the first line of its program.
CHANGED = {
    "scaled": ("w = nn.Parameter(torch.randn(3)) * 0.1", "w = nn.Parameter(torch.randn(3) * 0.1)"),
    "halved": ("w = torch.randn(3, requires_grad=True) / 2", "w = (torch.randn(3) / 2).requires_grad_()"),
    "filled first": (
        "w = nn.init.normal_(torch.empty(3, requires_grad=True)) / 2",
        "w = (nn.init.normal_(torch.empty(3)) / 2).requires_grad_()",
    ),
    "moved": ("w = Variable(torch.randn(3), requires_grad=True).cuda()", "w = torch.randn(3).cuda().requires_grad_()"),
    "a sum inside": ("w = a - nn.Parameter(b + c)", "w = nn.Parameter(a - (b + c))"),
    "bounded": (
        "w = torch.zeros(3).requires_grad_().exp()\nfor x in data:\n    y = w * x",
        "w = torch.zeros(3).requires_grad_()\nfor x in data:\n    y = w.exp() * x",
    ),
    "bounded and scaled": (
        "w = 2 * F.softplus(nn.Parameter(torch.zeros(1)))\nfor x in data:\n    y = w * x",
        "w = nn.Parameter(torch.zeros(1))\nfor x in data:\n    y = (2 * F.softplus(w)) * x",
    ),
    "alike": (
        "h = nn.Parameter(torch.zeros(1, 3)).expand(4, 3) * 2\nfor x in data:\n    y = h * x",
        "h = nn.Parameter(torch.zeros(1, 3))\nfor x in data:\n    y = (h.expand(4, 3) * 2) * x",
    ),
    "scaled by a number of the file": (
        "w = nn.Parameter(torch.randn(3)) * s\ns = 1 / math.sqrt(3)",
        "w = nn.Parameter(torch.randn(3) * s)",
    ),
    "masked": (
        "w = nn.Parameter(torch.randn(3)) * m\nm = torch.rand(3) > 0.5\nfor x in data:\n    y = w * x",
        "w = nn.Parameter(torch.randn(3))\nm = torch.rand(3) > 0.5\nfor x in data:\n    y = (w * m) * x",
    ),
    "bounded, and trained in a list": (
        "w = nn.Parameter(a).exp()\nopt = SGD([w, b])\ny = torch.stack([w, w.grad])",
        "w = nn.Parameter(a)\nopt = SGD([w, b])\ny = torch.stack([w.exp(), w.grad])",
    ),
    "bounded, and written": ("w = nn.Parameter(a).exp()\ny = w * x\nw.clamp_(0, 1)", None),
    "masked, with no reader": ("w = nn.Parameter(torch.randn(3)).mul(x > 0)", None),
    "each of a list": (
        "ws = [torch.ones(n, requires_grad=True).to(d) for n in (2, 3)]",
        "ws = [torch.ones(n).to(d).requires_grad_() for n in (2, 3)]",
    ),
    "beside a leaf": (
        "ws = [nn.Parameter(a), nn.Parameter(b) / 2, c]",
        "ws = [nn.Parameter(a), nn.Parameter(b / 2), c]",
    ),
    "by name": (
        "ws = {k: torch.ones(2, requires_grad=True) * 0.1 for k in ks}",
        "ws = {k: (torch.ones(2) * 0.1).requires_grad_() for k in ks}",
    ),
    "appended": ("ws.append(nn.Parameter(a).cuda())", "ws.append(nn.Parameter(a.cuda()))"),
    "bounded in a list": ("ws = [nn.Parameter(a).exp() for a in b]\ny = ws[0]", None),
    "a leaf": ("w = nn.Parameter(torch.randn(3))", None),
    "two leaves": ("w = nn.Parameter(a) * nn.Parameter(b)", None),
    "bounded, with numbers drawn": ("w = torch.lerp(nn.Parameter(a), torch.rand(3), 0.5)\ny = w.sum()", None),
    "bounded, with many readers": ("w = nn.Parameter(a).exp()\ny = w + w\nz = w + w", None),
    "bounded, bound twice": ("w = nn.Parameter(a).exp()\nfor x in data:\n    w = w * x", None),
}


@each("name", CHANGED)
def test_leaf_is_bound_alone(name: str, tmp_path: Path) -> None:
    before, after = CHANGED[name]
    file = tmp_path / f"{name}.py".replace(" ", "_")
    file.write_text(f"{before}\n", encoding="utf-8")
    change = leaf_alone(Frame(file=str(file), line=1, function="<module>"))
    assert (None if change is None else change.new) == after


@each(
    ("write", "value"),
    [
        ("self.w += a", "self.w + a"),
        ("self.w -= a * b", "self.w - a * b"),
        ("self.w -= a + b", "self.w - (a + b)"),
        ("self.w /= a if c else b", "self.w / (a if c else b)"),
        ("self.w.add_(n, alpha=0.1)", "self.w.add(n, alpha=0.1)"),
        # No gradient goes through their results: the parameter would never train.
        ("self.w.round_()", None),
        ("self.w //= 2", None),
        ("for a in noise: self.w += a", None),
    ],
)
def test_a_forward_computes_under_a_name_of_its_own(tmp_path: Path, write: str, value: str | None) -> None:
    file = tmp_path / "layer.py"
    file.write_text(f"class Layer:\n    def forward(self, x):\n        {write}\n        return x @ self.w\n")
    change = own_name_in_forward(Frame(str(file), 3, "Layer.forward", 9, 3, 9 + len(write), True))
    changed = None if change is None else apply_change(file.read_text(), change).split("\n")[2:4]
    assert changed == (None if value is None else [f"        w = {value}", "        return x @ w"])
