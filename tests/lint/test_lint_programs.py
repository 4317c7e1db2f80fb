"""Programs in the style of users, each with a fault at the lines that are marked, and their right twins."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gradsan.lint import check
from gradsan.text import codes, page

HERE = Path(__file__).parent
FAULTY = sorted((HERE / "faulty").glob("*.py"))


def found(source: str, file: str = "example.py") -> list[tuple[int, str]]:
    return [(one.at.line, one.code) for one in check(source.encode(), file).findings if one.is_sure]


@pytest.mark.parametrize("file", FAULTY, ids=lambda file: file.stem)
def test_the_fault_is_found_and_the_right_twin_is_quiet(file: Path) -> None:
    source = file.read_text(encoding="utf-8")
    rows = enumerate(source.split("\n"), 1)
    marked = [(line, found_mark[1]) for line, row in rows if (found_mark := re.search(r"# (GS\d{3})$", row))]
    assert marked
    assert found(source) == marked
    assert found((HERE / "right" / file.name).read_text(encoding="utf-8")) == []


def examples(markdown: str, heading: str) -> list[str]:
    body = markdown.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    return re.findall(r"^```python\n(.*?)^```$", body, re.MULTILINE | re.DOTALL)


def test_pages_show_what_lint_finds_and_the_right_versions_are_quiet() -> None:
    wrong = {}
    for entry in codes():
        markdown = page(entry.code, "en")
        failing = examples(markdown, "A small failing example")
        told = re.search(r"\$ gradsan lint example.py\n(.*?)^```$", markdown, re.MULTILINE | re.DOTALL)
        shown = [] if told is None else re.findall(r"^example.py:(\d+):\d+: (GS\d+)", told[1], re.MULTILINE)
        came = [(str(line), code) for line, code in found(failing[0])]
        if (told is None and entry.code in {code for _, code in came}) or (told is not None and shown != came):
            wrong[entry.code] = (shown, came)
        loud = [one for source in examples(markdown, "The right version") for one in found(source)]
        if loud:
            wrong[entry.code, "right"] = loud
    assert wrong == {}


@pytest.mark.parametrize(
    "source",
    [
        # What a linter of names alone would take for faults.
        "import torch\nd = {}\nd['x'] = torch.sigmoid(torch.ones(3, requires_grad=True))\nd['x'] = 1\nsum(d.values())",
        "import numpy as np\nimport torch\nw = torch.ones(3, requires_grad=True)\na = np.exp(np.ones(3))\na += 1\n"
        "(w * 2).sum().backward()",
        "import torch\nfrom torch import nn\n\nclass M(nn.Module):\n    def forward(self, x):\n"
        "        y = torch.relu(x)\n        if not self.training:\n            y += 1\n        return y",
        "import torch\nw = torch.ones(3, requires_grad=True)\nwith torch.no_grad():\n    y = torch.exp(w)\n    y += 1\n"
        "(w * y).sum().backward()",
        "import torch\nfrom torch import nn\nnet = nn.Linear(2, 1)\n"
        "opt = torch.optim.SGD(net.parameters(), 0.1)\n"
        "for x in torch.randn(4, 3, 2):\n    loss = net(x).mean()\n    opt.zero_grad()\n    loss.backward()\n"
        "    opt.step()",
        "import torch\nfrom accelerate import Accelerator\na = Accelerator()\n\ndef train(model, data, opt):\n"
        "    for x, y in data:\n        loss = model(x, labels=y).loss\n        a.backward(loss)\n        opt.step()",
        # A method of a module that is not its call, and a dict where a branch has a parameter.
        "import torch\nfrom lib import Net\nnet = Net()\n"
        "opt = torch.optim.Adam(net.parameters())\nx = net.features()\n\n\n"
        "def train():\n    loss = net(x).mean()\n    opt.zero_grad()\n    loss.backward()\n    opt.step()\n\n\n"
        "for epoch in range(9):\n    train()",
        "import torch\nfrom torch.nn import Parameter\n\n\nclass E:\n    def make(self, many):\n"
        "        self.mask = {k: Parameter(torch.ones(2)) for k in many} if many else Parameter(torch.ones(2))\n\n"
        "    def read(self):\n        return [m.grad for _, m in self.mask.items()]",
        # A module's own flag.
        "from torch import nn\n\n\nclass C(nn.Module):\n    def __init__(self, requires_grad=True):\n"
        "        super().__init__()\n        self.requires_grad = requires_grad",
        "import pytest\nimport torch\n\ndef test_it():\n    w = torch.ones(3, requires_grad=True)\n"
        "    with pytest.raises(RuntimeError):\n        w += 1",
    ],
)
def test_what_is_right_is_quiet(source: str) -> None:
    assert found(source) == []
