"""Terms of a loss that are constants: the lines with which they take part in the gradient."""

import pytest

from gradsan.model import Frame
from gradsan.source import graph_restored

_PROGRAM = """import torch
def loss_of(net, x, q):
{lines}
    loss = net(x).mean() + 0.1 * term
    return loss, {returned}
"""
_OFF = "    with torch.no_grad():\n"


def frame_at(file, expression):
    text = file.read_text().splitlines()
    line = next(number for number, one in enumerate(text, 1) if expression in one)
    column = text[line - 1].index(expression) + 1
    return Frame(str(file), line, "loss_of", column, line, column + len(expression), True)


@pytest.mark.parametrize(
    ("lines", "computed", "how", "returned", "made"),
    [
        ("    term = net(x).mean().item()", "net(x).mean().item()", "number", "0", ["term = net(x).mean()"]),
        ("    term = torch.tensor(x.std().item())", "x.std().item()", "number", "0", ["term = x.std()"]),
        ("    term = 2 * float(-x.std())", "float(-x.std())", "number", "0", ["term = 2 * (-x.std())"]),
        (
            "    term = float(-x.std())",
            "float(-x.std())",
            "number",
            "round(term, 3)",
            ["term_term = -x.std()\n    term = float(term_term)", "0.1 * term_term"],
        ),
        (
            "    term = x.std().item()",
            "x.std().item()",
            "number",
            "term",
            ["term_term = x.std()\n    term = term_term.item()", "0.1 * term_term"],
        ),
        ("    term = 2 * net.data.abs().sum()", "net.data.abs()", None, "0", ["2 * net.abs().sum()"]),
        ("    term = (q.detach() - x.detach()).std()", "(q.detach() - x.detach()).std()", None, "0", ["(q - x).std()"]),
        ("    term = (q - x).std()", "q - x", None, "0", []),
        ("    term = net(q.sample()).mean()", "q.sample()", "drawn", "0", ["net(q.rsample()).mean()"]),
        ("    term = net(q.mode).mean()", "q.mode", "drawn", "0", []),
        (f"{_OFF}        term = x.std()", "x.std()", "no_grad", "0", ["\n    term = x.std()"]),
        (
            f"{_OFF}        a = x * 2\n        term = a.std()",
            "x * 2",
            "no_grad",
            "0",
            ["\n    a = x * 2", "\n    term = a.std()"],
        ),
        (
            f"{_OFF}        net.update(x)\n        term = net(x).std()",
            "net(x).std()",
            "no_grad",
            "0",
            ["\n    term = net(x).std()"],
        ),
        (f"{_OFF}        a = x * 2\n        net.update(x)\n        term = a.std()", "x * 2", "no_grad", "0", []),
    ],
)
def test_a_term_gets_its_graph(tmp_path, lines, computed, how, returned, made):
    file = tmp_path / "train.py"
    file.write_text(_PROGRAM.format(lines=lines, returned=returned))
    found = graph_restored([frame_at(file, computed)], how, frame_at(file, "loss = net(x).mean() + 0.1 * term"))
    new = "\n" + "\n".join(one for _, _, one in found)
    assert bool(found) == bool(made)
    assert all(one in new for one in made)
