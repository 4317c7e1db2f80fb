"""A write to a part as a new tensor: the line reads as expected, runs, and computes the same values."""

from __future__ import annotations

import pytest
from source_snippets import run_with_torch, without_columns

from cases import each
from gradsan.model import Frame
from gradsan.source import apply_change, element_out_of_place, part_out_of_place
from gradsan.source.rewrite.scatter import mask_out_of_place

HEAD = """
import torch
torch.manual_seed(0)
x, v = torch.rand(4, 3, 2) + 1, torch.rand(3, 2) + 1
row, rows, idx, mask = torch.rand(2), torch.rand(2, 3, 2), torch.tensor([2, 0]), torch.rand(4, 3, 2) > 0.5
i, states = 1, [torch.rand(3), torch.rand(3)]
"""
# (program, operation, whether the index is a tensor, the line that is expected)
PARTS = [
    ("x[1] = v", "__setitem__", False, "x = x.select_scatter(v, 0, 1)"),
    ("x[i] = (v\n    + 1)", "__setitem__", False, "x = x.select_scatter((v\n    + 1), 0, i)"),
    ("x[-1] += v  # note", "__setitem__", False, "x = x.select_scatter(x[-1] + v, 0, -1)  # note"),
    ("x[i] *= v - 1", "__setitem__", False, "x = x.select_scatter(x[i] * (v - 1), 0, i)"),
    ("x[:, 2] = x[:, 0] * 2", "__setitem__", False, "x = x.select_scatter(x[:, 0] * 2, 1, 2)"),
    ("x[:, i].mul_(2).add_(1)", "mul_", False, "x = x.select_scatter(x[:, i].mul(2).add(1), 1, i)"),
    ("x[..., 1] = 0.5", "__setitem__", False, "x = x.select_scatter(torch.full_like(x[..., 1], 0.5), -1, 1)"),
    ("x[..., 1:, :].zero_()", "zero_", False, "x = x.slice_scatter(torch.zeros_like(x[..., 1:, :]), -2, 1)"),
    ("x[:2] = rows", "__setitem__", False, "x = x.slice_scatter(rows, 0, None, 2)"),
    ("x[::2] = rows", "__setitem__", False, "x = x.slice_scatter(rows, 0, None, None, 2)"),
    ("x[1, 2] = row", "__setitem__", False, "x = x.select_scatter(x[1].select_scatter(row, 0, 2), 0, 1)"),
    ("x[:, 1, 0] += 1", "__setitem__", False,
     "x = x.select_scatter(x[:, 1].select_scatter(x[:, 1, 0] + 1, 1, 0), 1, 1)"),
    ("x[1:3, i] = v[:2]", "__setitem__", False, "x = x.slice_scatter(x[1:3].select_scatter(v[:2], 1, i), 0, 1, 3)"),
    ("x[mask] = 0.0", "__setitem__", True, "x = x.masked_fill(mask, 0.0)"),
    ("x[x > 1.5] = -1", "__setitem__", True, "x = x.masked_fill(x > 1.5, -1)"),
    ("x[mask] *= 2", "__setitem__", True, "x = x.index_put((mask,), x[mask] * 2)"),
    ("x[idx] = 0.0", "__setitem__", True, "x = x.index_put((idx,), x.new_tensor(0.0))"),
    ("x[idx, idx] = row", "__setitem__", True, "x = x.index_put((idx, idx), row)"),
    ("x[idx] = float('inf')", "__setitem__", True, "x = x.index_put((idx,), x.new_tensor(float('inf')))"),
    ("x[x > 1.5] = -torch.pi", "__setitem__", True, "x = x.masked_fill(x > 1.5, -torch.pi)"),
    ("x[idx] = v", "__setitem__", True, "x = x.index_put((idx,), v)"),
    # What the run does not tell, the source does: a name that is only ever bound to whole numbers.
    ("LAST = 2\nx[:, LAST] = 0.5", "__setitem__", None,
     "x = x.select_scatter(torch.full_like(x[:, LAST], 0.5), 1, LAST)"),
    # A name of a number is filled in as a number is: index_put takes tensors only.
    ("low, high = 1.5, 2\nx[x < low] = low", "__setitem__", True, "x = x.masked_fill(x < low, low)"),
    ("low = 0.25\nx[idx] = low", "__setitem__", True, "x = x.index_put((idx,), x.new_tensor(low))"),
]  # fmt: skip
NONE = [
    ("x[None, 0] = v", "__setitem__", False),
    # A list or a range of positions is no tensor, which index_put asks for.
    ("x[range(2), range(2)] = 0.0", "__setitem__", True),
    ("x[[0, 1]] = 0.0", "__setitem__", True),
    ("places = [0, 1]\nx[places] = 0.0", "__setitem__", True),
    ("x[:, idx] = rows[:, 0]", "__setitem__", True),
    ("x[0, 1, 1] = 3.0", "__setitem__", False),
    ("states[0][1] = 3.0", "__setitem__", False),
    ("LAST = 2\nLAST = idx\nx[:, LAST] = 0.5", "__setitem__", None),
    ("for q in (x,):\n    (lambda: q[0].mul_(2))()", "mul_", False),
    # What the class was given may be a number, which no scatter takes.
    (
        "class Blank:\n    def __init__(self, fill):\n        self.fill = fill\n"
        "    def __call__(self, y):\n        y[0] = self.fill\nBlank(0.5)(x)",
        "__setitem__",
        False,
    ),
]


def frames_of(ran, body):
    first = ran.text.count("\n") - body.rstrip("\n").count("\n")
    return [frame for _, frame in ran.events if frame.line >= first]


@each(("body", "op", "by_tensor", "expected"), PARTS, ids=[case[0] for case in PARTS])
def test_a_part_becomes_a_new_tensor(tmp_path, body, op, by_tensor, expected):
    torch = pytest.importorskip("torch")
    ran = run_with_torch(tmp_path, f"{HEAD}before = x\n{body}")
    frames = frames_of(ran, body)
    by_line = Frame(ran.file, frames[0].line, frames[0].function)
    changes = {part_out_of_place(frame, op, by_tensor) for frame in [*frames, by_line]} - {None}
    assert [change.new for change in changes] == [expected]
    again = run_with_torch(tmp_path, apply_change(ran.text, changes.pop()))
    assert torch.equal(again.names["x"], ran.names["x"])
    assert again.names["x"] is not again.names["before"]
    assert not torch.equal(again.names["before"], ran.names["x"])


@each(("body", "op", "by_tensor"), NONE, ids=[case[0] for case in NONE])
def test_no_line_where_none_says_the_same(tmp_path, body, op, by_tensor):
    pytest.importorskip("torch")
    ran = run_with_torch(tmp_path, HEAD + body)
    frames = frames_of(ran, body)
    assert frames
    for frame in frames:
        assert part_out_of_place(frame, op, by_tensor) is None
        assert part_out_of_place(without_columns(frame), op, by_tensor) is None


@each(
    ("index", "expected"),
    [
        ("x[k] = v", "x = x.select_scatter(v, 0, k)"),
        ("x[k + 1] = v", "x = x.select_scatter(v, 0, k + 1)"),
        ("x[x > 1] = 2", "x = x.masked_fill(x > 1, 2)"),
    ],
)
def test_the_source_is_read_where_the_run_does_not_show_it(tmp_path, index, expected):
    pytest.importorskip("torch")
    ran = run_with_torch(tmp_path, f"{HEAD}for k in range(2):\n    {index}")
    frame = next(frame for op, frame in ran.events if op == "__setitem__")
    assert part_out_of_place(frame, "__setitem__").new.strip() == expected


@each(
    ("body", "op", "expected"),
    [
        ("states[i] += 1", "__iadd__", "states[i] = states[i] + 1"),
        ("states[0].mul_(2).exp_()", "mul_", "states[0] = states[0].mul(2).exp()"),
    ],
)
def test_an_element_of_a_list_becomes_a_new_tensor(tmp_path, body, op, expected):
    torch = pytest.importorskip("torch")
    ran = run_with_torch(tmp_path, f"{HEAD}before = list(states)\n{body}")
    changes = {element_out_of_place(frame, op) for frame in frames_of(ran, body)} - {None}
    assert [change.new for change in changes] == [expected]
    again = run_with_torch(tmp_path, apply_change(ran.text, changes.pop()))
    assert all(torch.equal(a, b) for a, b in zip(again.names["states"], ran.names["states"], strict=True))
    assert sum(a is b for a, b in zip(again.names["states"], again.names["before"], strict=True)) == 1


@each(
    ("body", "is_of_rows", "expected"),
    [
        ("keep = mask\nx[keep] = 0", False, "x = x.masked_fill(keep, 0)"),
        ("rare = mask[:, :, 0]\nx[rare] = -1.0", True, "x = x.masked_fill(rare.unsqueeze(-1), -1.0)"),
        ("x[1] = 0", False, None),
        ("x[idx] = v", False, None),
    ],
)
def test_a_number_may_be_filled_in_by_what_may_be_a_mask(tmp_path, body, is_of_rows, expected):
    torch = pytest.importorskip("torch")
    ran = run_with_torch(tmp_path, f"{HEAD}{body}")
    frame = next(frame for op, frame in ran.events if op == "__setitem__")
    change = mask_out_of_place(frame, "__setitem__", is_of_rows=is_of_rows)
    assert (None if change is None else change.new) == expected
    if change is not None:
        again = run_with_torch(tmp_path, apply_change(ran.text, change))
        assert torch.equal(again.names["x"], ran.names["x"])
