"""Tensors whose gradient is read behind a backward, and the lines that let them require grad."""

from cases import each
from gradsan.model import Frame
from gradsan.source import read_gradients, require_grad_of

# (program, the names, what the changed lines add where others may keep the tensor, what they add where an optimizer
# has it); the backward is the line that ends in "# here".
CASES = [
    (
        "w = torch.zeros(3)\nloss = (x @ w).sum()\nloss.backward()  # here\nw -= w.grad",
        ["w"],
        ["w = torch.zeros(3).requires_grad_(True)"],
        ["w = torch.zeros(3).requires_grad_(True)"],
    ),
    (
        "def attack(image):\n    loss = net(image).sum()\n    loss.backward()  # here\n    return image.grad.sign()",
        ["image"],
        ["    image = image.detach().requires_grad_(True)"],
        [],
    ),
    (
        "def load():\n    image = read()\n    return image\ndef attack(image):\n    loss = net(image).sum()\n"
        "    loss.backward()  # here\n    return image.grad.sign()",
        ["image"],
        ["    image = image.detach().requires_grad_(True)"],
        [],
    ),
    (
        "image = read()\ndef attack():\n    loss = net(image).sum()\n    loss.backward()  # here\n"
        "    return image.grad.sign()",
        ["image"],
        ["image = read().requires_grad_(True)"],
        ["image = read().requires_grad_(True)"],
    ),
    (
        "def attack(image):\n    for _ in range(3):\n        loss = net(image).sum()\n        loss.backward()  # here\n"
        "        image = clip(image + image.grad.sign())",
        ["image"],
        ["        image = image.detach().requires_grad_(True)"],
        [],
    ),
    (
        "def fit(self):\n    out = x @ self.w\n    out.sum().backward()  # here\n    self.w = self.w - self.w.grad",
        ["self.w"],
        ["    self.w.requires_grad_(True)"],
        [],
    ),
    (
        "for _ in range(3):\n    loss = f(x)\n    loss.backward()  # here\n    x = x + x.grad\n    y = y - y.grad",
        ["x", "y"],
        [],
        [],
    ),
    ("loss = net(x).sum()\nloss.backward()  # here\nfor p in net.parameters():\n    p.data -= p.grad", [], [], []),
    ("print(x.grad)\nloss = net(x).sum()\nloss.backward()  # here\nx.grad = None", [], [], []),
]


@each(("program", "names", "added", "added_where_made"), CASES)
def test_what_is_read_behind_a_backward_is_told_to_require_grad(tmp_path, program, names, added, added_where_made):
    file = tmp_path / "train.py"
    file.write_text(f"import torch\n{program}\n", encoding="utf-8")
    rows = file.read_text(encoding="utf-8").split("\n")
    line = next(at for at, row in enumerate(rows, 1) if row.endswith("# here"))
    frame = Frame(str(file), line, "<module>", is_user=True)
    assert read_gradients(frame) == names
    for where_made, expected in ((False, added), (True, added_where_made)):
        found = require_grad_of(frame, names, where_made=where_made)
        assert [row for _, _, text in found for row in text.split("\n") if row not in rows] == expected
