"""Copies of what a call takes or hands out, and whether a line binds what a call of it gives."""

from __future__ import annotations

from dataclasses import replace

from cases import each
from gradsan.model import Frame
from gradsan.source import binds_result, changed_lines, clone_handed_out, may_step, under_no_grad
from gradsan.source.imports import lines_with_imports


def frame_at(tmp_path, text: str, call: str) -> Frame:
    """A frame that executes ``call``, a part of the one line ``text``."""
    path = tmp_path / "line.py"
    path.write_text(text + "\n")
    column = text.index(call) + 1
    return Frame(str(path), 1, "<module>", column=column, end_line=1, end_column=column + len(call), is_user=True)


@each(
    ("text", "call", "bypass", "changed"),
    [
        ("a = h.detach().cpu().numpy()", "h.detach().cpu().numpy()", "numpy", "a = h.detach().cpu().clone().numpy()"),
        ("a = np.asarray(h.detach())", "np.asarray(h.detach())", "__array__", "a = np.asarray(h.detach().clone())"),
        ("a = np.asarray(-h)", "np.asarray(-h)", "__array__", "a = np.asarray((-h).clone())"),
        ("t = jnp.from_dlpack(h)", "jnp.from_dlpack(h)", "__dlpack__", "t = jnp.from_dlpack(h.clone())"),
        ("h = torch.from_numpy(a)", "torch.from_numpy(a)", "from_numpy", "h = torch.from_numpy(a).clone()"),
        ("h = from_dlpack(a)", "from_dlpack(a)", "from_dlpack", "h = from_dlpack(a).clone()"),
        ("h = f(torch.asarray(a))", "torch.asarray(a)", "asarray", "h = f(torch.asarray(a).clone())"),
        # The copy would be gone before its address is used.
        ("kernel(h.data_ptr())", "h.data_ptr()", "data_ptr", None),
        ("a = np.asarray(*hs)", "np.asarray(*hs)", "__array__", None),
    ],
)
def test_memory_of_its_own(tmp_path, text, call, bypass, changed):
    frame = frame_at(tmp_path, text, call)
    change = clone_handed_out(frame, bypass)
    assert (None if change is None else changed_lines(frame.file, change)[0][2]) == changed


@each(
    ("text", "call", "binds"),
    [
        ("h = net(x)", "net(x)", True),
        ("h = net(x).view(-1)[1:].T", "net(x)", True),
        ("h = net(x).mul_(2)", "net(x)", True),
        ("h = net(x) if wide else x", "net(x)", True),
        ("out, h = net(x)", "net(x)", True),
        ("loss = F.mse_loss(net(x), y)", "net(x)", False),
        ("h = net(x) + 1", "net(x)", False),
        ("h = net(x).relu()", "net(x)", False),
        ("h *= net(x)", "h *= net(x)", True),
        ("print(net(x))", "net(x)", False),
    ],
)
def test_names_that_a_line_binds(tmp_path, text, call, binds):
    assert binds_result(frame_at(tmp_path, text, call)) is binds


@each(
    ("call", "steps", "with_columns", "without"),
    [
        ("Adam(D)", "og.step(), od.step()", True, True),
        ("Adam(D)", "og.step()", False, False),
        ("Adam(G)", "og.step()", True, False),
        ("Adam(G)", "print(og)", False, False),
    ],
)
def test_a_step_of_an_optimizer_that_shares_its_line(tmp_path, call, steps, with_columns, without):
    frame = frame_at(tmp_path, f"og, od = Adam(G), Adam(D)\n{steps}", call)
    assert may_step(frame, frame) is with_columns
    # Python 3.10 knows no columns: then the line may have made either.
    bare = replace(frame, column=None, end_column=None)
    assert may_step(bare, bare) is without


@each(
    ("head", "imported"),
    [
        ("import torch", None),
        ("from parts import *", None),
        # Nothing that the file shows binds it.
        ("from parts import Block", "import torch\nfrom parts import Block"),
        ("import math", "import math\n\nimport torch"),
        ("x = 1", "import torch\n\n\nx = 1"),
        # The file's own variable.
        ("torch = load('torch')", None),
    ],
)
def test_torch_may_come_from_a_star_import_or_is_imported(tmp_path, head, imported):
    file = tmp_path / "program.py"
    file.write_text(f"{head}\nbias[0] = 1\nbias = torch.nn.Parameter(bias)\n")
    change = under_no_grad(Frame(str(file), 2, "<module>", 1, 2, 12, is_user=True))
    lines = lines_with_imports(changed_lines(str(file), change))
    assert [text for _, line, text in lines if line == 1] == ([] if imported is None else [imported])
    assert lines[-1][2].startswith("with torch.no_grad():")
