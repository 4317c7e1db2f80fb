"""A filled tensor as a list of parts: the whole text reads as expected, runs, and computes the same."""

from __future__ import annotations

import textwrap

import pytest
from source_snippets import run_with_torch

from cases import each
from gradsan.model import Frame
from gradsan.source import apply_change, list_and_stack

HEAD = """
import torch
torch.manual_seed(0)
f, x = torch.nn.Linear(3, 3), torch.rand(4, 3)
"""
# (body, body afterwards); the frame is the store marked "#!".
LISTS = {
    "leading dimension": (
        """
        out = torch.zeros(4, 3)
        for t in range(1, len(out)):
            out[t] = f(out[t - 1]) + x[t]  #!
        y = out.sum()
        """,
        """
        out = list(torch.zeros(4, 3).unbind())
        for t in range(1, len(out)):
            out[t] = f(out[t - 1]) + x[t]  #!
        y = torch.stack(out).sum()
        """,
    ),
    "second dimension, with sizes, parts of parts and slices": (
        """
        out = torch.zeros(
            2, 4, 3,
        )
        out[:, 0] = 1
        for t in range(out.size(1) - 1):
            out[:, t + 1] = f(out[:, t]) * out[:, t, 0].mean() + out.shape[2] + out[:, :t + 1].sum()  #!
        y = out.mean()
        """,
        """
        out = list(torch.zeros(
            2, 4, 3,
        ).unbind(1))
        out[0] = torch.full_like(out[0], 1)
        for t in range(len(out) - 1):
            out[t + 1] = f(out[t]) * out[t][:, 0].mean() + out[0].size(1) + torch.stack(out[:t + 1], 1).sum()  #!
        y = torch.stack(out, 1).mean()
        """,
    ),
    "two leading dimensions": (
        """
        out = (x @ x.T).unsqueeze(-1) * x  # a note
        for a in range(out.size(0)):
            for b in range(out.size(1)):
                out[a, b] = f(out[a, b]) + out[a].sum()  #!
        y = out.sum()
        """,
        """
        out = (x @ x.T).unsqueeze(-1) * x  # a note
        out = [list(part.unbind()) for part in out.unbind()]
        for a in range(len(out)):
            for b in range(len(out[0])):
                out[a][b] = f(out[a][b]) + torch.stack(out[a]).sum()  #!
        y = torch.stack([torch.stack(part) for part in out]).sum()
        """,
    ),
    "last dimension of any number": (
        """
        out = torch.zeros(2, 3, 4)
        for t in range(out.size(-1)):
            out[..., t] = f(out[..., t - 1]) + out[..., :t + 1].sum() + out.shape[0]  #!
        y = out.sum()
        """,
        """
        out = list(torch.zeros(2, 3, 4).unbind(-1))
        for t in range(torch.stack(out, -1).size(-1)):
            out[t] = f(out[t - 1]) + torch.stack(out[:t + 1], -1).sum() + torch.stack(out, -1).shape[0]  #!
        y = torch.stack(out, -1).sum()
        """,
    ),
    "an operator in the value, and added to": (
        """
        out = x * 2
        for t in range(4):
            out[t] += f(x[t]) - 1  #!
        y = out.sum()
        """,
        """
        out = list((x * 2).unbind())
        for t in range(4):
            out[t] = out[t] + (f(x[t]) - 1)  #!
        y = torch.stack(out).sum()
        """,
    ),
}
FILL = "out = torch.zeros(4, 3)\n{before}for t in range(2):\n    {store}  #!\n{after}"
NONE = {
    "not in a loop": "out = torch.zeros(4, 3)\nout[0] = x[0]  #!\ny = out.sum()",
    "made in two places": FILL.format(before="out = out + 1\n", store="out[t] = x[t]", after="y = out.sum()"),
    "stored in two ways": FILL.format(before="out[:, 0] = 1\n", store="out[t] = x[t]", after="y = out.sum()"),
    "a slice is stored": FILL.format(before="", store="out[t : t + 1] = x[t]", after="y = out.sum()"),
    "stored by the last dimension, read by the first": FILL.format(
        before="", store="out[..., t] = x[:, t]", after="y = out[0].sum()"
    ),
    "a new axis": FILL.format(before="", store="out[t] = x[t]", after="y = out[None].sum()"),
    "a mask": FILL.format(before="", store="out[out > t] = 1.0", after="y = out.sum()"),
    "deleted": FILL.format(before="", store="out[t] = x[t]", after="y = out.sum()\ndel out"),
}


def changed(tmp_path, body):
    ran = run_with_torch(tmp_path, HEAD + textwrap.dedent(body).lstrip("\n"))
    line = next(number for number, text in enumerate(ran.text.splitlines(), 1) if "#!" in text)
    frame = next(frame for op, frame in ran.events if frame.line == line and op == "__setitem__")
    return ran, list_and_stack(frame)


@each("case", LISTS)
def test_a_list_of_parts(tmp_path, case):
    torch = pytest.importorskip("torch")
    body, expected = LISTS[case]
    ran, change = changed(tmp_path, body)
    text = apply_change(ran.text, change)
    assert text == HEAD.lstrip("\n") + textwrap.dedent(expected).lstrip("\n")
    again = run_with_torch(tmp_path, text)
    assert torch.allclose(again.names["y"], ran.names["y"])


@each("case", NONE)
def test_no_list_where_a_use_is_not_understood(tmp_path, case):
    pytest.importorskip("torch")
    assert changed(tmp_path, NONE[case])[1] is None


@each("made", ["{}", "[None] * 4", "list(x)"])
def test_a_container_is_no_filled_tensor(tmp_path, made):
    file = tmp_path / "train.py"
    file.write_text(
        f"import torch\nout = {made}\nfor t in range(4):\n    out[t] = head(x)\ny = out\n", encoding="utf-8"
    )
    assert list_and_stack(Frame(str(file), 4, "<module>", 5, 4, 11, True)) is None
