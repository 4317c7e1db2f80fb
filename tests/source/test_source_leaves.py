"""Leaves made within an expression, bound alone: the statement, and what reads it, as they are changed."""

from __future__ import annotations

from pathlib import Path

from cases import each
from gradsan.model import Frame
from gradsan.source import leaf_alone

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
