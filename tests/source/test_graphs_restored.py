"""Constant terms of a loss, inputs told too late to require grad, results that keep none: lines with a gradient."""

from cases import each
from gradsan.model import Frame
from gradsan.source import changed_lines, flag_before_use, graph_restored, retained

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


@each(
    "lines, computed, how, returned, made",
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
        ("    term = (q.detach().argmax(1) == x).sum()", "(q.detach().argmax(1) == x)", "discrete", "0", []),
        ("    term = (q.detach().argmax(1) != x).sum()", "q.detach()", "detached", "0", []),
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
        (
            f"{_OFF}        aim = q(x)\n        a = x * 2\n        term = a.std()",
            "x * 2",
            "no_grad",
            "0",
            ["\n    a = x * 2", "\n    term = a.std()"],
        ),
        (f"{_OFF}        a = x * 2\n        net.update(x)\n        term = a.std()", "x * 2", "no_grad", "0", []),
        (f"{_OFF}        aim = q(x)\n        a = x * 2\n        net.c = a.mean()", "x * 2", "no_grad", "a", []),
        (f"{_OFF}        aim = q(x)\n        a = x * 2\n        c.add_(a)", "x * 2", "no_grad", "a", []),
    ],
)
def test_a_term_gets_its_graph(tmp_path, lines, computed, how, returned, made):
    file = tmp_path / "train.py"
    file.write_text(_PROGRAM.format(lines=lines, returned=returned))
    found = graph_restored([frame_at(file, computed)], how, frame_at(file, "loss = net(x).mean() + 0.1 * term"))
    new = "\n" + "\n".join(one for _, _, one in found)
    assert bool(found) == bool(made)
    assert all(one in new for one in made)


@each(
    "lines, made",
    [
        (["y = net(x)", "x.requires_grad_()", "(g,) = grad(y, x)"], ["x.requires_grad_()\n    y = net(x)", ""]),
        (["y = net(x)", "x.requires_grad = True", "(g,) = grad(y, x)"], ["x.requires_grad = True\n    y = net(x)", ""]),
        (["x.requires_grad_()", "y = net(x)", "(g,) = grad(y, x)"], []),
        (["y = net(q)", "x.requires_grad_()", "(g,) = grad(y, x)"], []),
        (["y = net(x)", "x = x * 2", "x.requires_grad_()", "(g,) = grad(y, x)"], []),
        (["y = net(x)", "(g,) = grad(y, x)"], []),
    ],
)
def test_a_flag_is_set_before_the_first_use(tmp_path, lines, made):
    file = tmp_path / "train.py"
    file.write_text("def loss_of(net, x, q):\n" + "".join(f"    {one}\n" for one in lines))
    found = flag_before_use(frame_at(file, "(g,) = grad(y, x)"), "x")
    assert [text.strip() for _, _, text in found] == made


@each(
    "lines, line",
    [
        (["h = net(x)", "loss = h.sum()", "loss.backward()", "use(h.grad)"], 4),
        (["h = net(x)", "h.sum().backward()", "h = h + 1", "use(h.grad)"], None),
        (["h = net(x)", "train(h)", "use(h.grad)"], None),
    ],
)
def test_a_result_keeps_its_gradient_before_the_backward(tmp_path, lines, line):
    file = tmp_path / "train.py"
    file.write_text("def loss_of(net, x, q):\n" + "".join(f"    {one}\n" for one in lines))
    found = changed_lines(str(file), retained(frame_at(file, "use(h.grad)"), "h"))
    assert [number for _, number, _ in found] == ([] if line is None else [line])
    assert all(text.startswith("    h.retain_grad()\n") for _, _, text in found)
