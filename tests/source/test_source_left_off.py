"""Gradients that another function has left switched off, and in-place results whose memory is read as a whole."""

import pytest

from gradsan.model import Frame
from gradsan.source.flow.cuts import grad_left_off
from gradsan.source.rewrite.cuts.undone import as_decorator
from gradsan.source.rewrite.out_of_place import result_out_of_place

TRAIN = "import torch, other\ndef train(x):\n    loss = net(x).sum()\n    loss.backward()\n    {called}(x)\n"
HELPER = "{decorated}def checked(x):\n    {before}torch.set_grad_enabled(False)\n    return net(x)\n"


@pytest.mark.parametrize(
    ("called", "decorated", "before", "after", "line", "is_replaced"),
    [
        ("checked", "", "", "", 7, True),
        ("checked", "", "y = net(x)\n    ", "", 8, False),
        ("checked", "", "net.eval()\n    ", "", 8, True),
        ("checked", "", "n = 2; ", "", 7, False),
        ("other.checked", "", "", "", None, False),
        ("another", "", "", "", None, False),
        ("checked", "@torch.no_grad()\n", "", "", None, False),
        ("checked", "", "", "torch.set_grad_enabled(True)\n", None, False),
    ],
)
def test_of_functions_that_are_called_the_only_one(tmp_path, called, decorated, before, after, line, is_replaced):
    file = tmp_path / "train.py"
    file.write_text(TRAIN.format(called=called) + HELPER.format(decorated=decorated, before=before) + after)
    found = grad_left_off([Frame(str(file), 4, "train", None, None, None, True)])
    assert (found and found.line) == line
    assert (found is not None and as_decorator(found) is not None) == is_replaced


@pytest.mark.parametrize(
    ("returned", "is_changed"),
    [("t", True), ("p[4:]", True), ("raw", False), ("p", False), ("p[:2]", False), ("same", False), ("flat", False)],
)
def test_a_part_is_written_out_of_place_where_the_whole_is_not_read(tmp_path, returned, is_changed):
    views = "    raw = conv(x)\n    p = raw.view(6, 4)\n    same = p\n    flat = p.flatten()\n"
    file = tmp_path / "head.py"
    file.write_text(f"def head(x):\n{views}    s = p[:2].sigmoid_()\n    t = p[2:].exp()\n    return s, {returned}\n")
    change = result_out_of_place(Frame(str(file), 6, "head", None, None, None, True), "sigmoid_")
    assert (change is not None) == is_changed
