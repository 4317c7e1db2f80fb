"""Variables that a round of a loop binds anew before it reads them."""

import textwrap

from cases import each
from gradsan.model import Frame
from gradsan.source import backward_of_sum, detach_after_yield, run_again
from gradsan.source.flow.rounds import bound_each_round, of_one_round


@each(
    ("body", "bound"),
    [
        ("loss = step(batch)\nloss.backward()", {"loss"}),
        ("loss, aux = step(batch)", {"loss", "aux"}),
        ("print(loss)\nloss = step(batch)", set()),
        ("mean += value\nmean = mean / 2", set()),
        ("mean += value\nother = value\nmean = 0.0", {"other"}),
        ("mean = 0.0\nmean += value", {"mean"}),
        ("if first:\n    loss = step(batch)\nprint(loss)", set()),
        ("for part in batch:\n    seen += part\nseen = 0", set()),
    ],
)
def test_variables_bound_before_they_are_read(tmp_path, body, bound):
    (tmp_path / "loop.py").write_text("for batch in data:\n" + textwrap.indent(body, "    ") + "\n")
    assert bound_each_round(str(tmp_path / "loop.py"), 2) == bound


def test_in_a_function_that_each_round_calls_its_whole_body_counts(tmp_path):
    (tmp_path / "loop.py").write_text("def step(batch):\n    out = net(batch)\n    kept.append(out)\n\nlast = 3\n")
    assert bound_each_round(str(tmp_path / "loop.py"), 2) == {"out"}
    assert bound_each_round(str(tmp_path / "loop.py"), 5) == frozenset()


def test_of_nested_loops_each_counts_unless_one_further_out_reads_it(tmp_path):
    inner = "    for part in data:\n        out = net(part)\n        loss = out.sum()\n"
    (tmp_path / "loop.py").write_text(f"for epoch in range(3):\n{inner}    print(loss)\n")
    assert bound_each_round(str(tmp_path / "loop.py"), 4) == {"out"}


def test_what_is_read_in_some_rounds_only_is_not_of_one_round(tmp_path):
    head = "def train():\n    for step in range(300):\n        raw = net(data)\n"
    head += "        part = raw[:2]\n        loss = part.sum()\n"
    readers = {
        "        loss.backward()\n": {"raw", "part", "loss"},
        "        if step % 100 == 0:\n            print(raw)\n": {"part", "loss"},
        "        report(step, raw)\n": {"part", "loss"},
        "        kept.append(raw)\n": {"raw", "part", "loss"},
        "    print(raw)\n": {"part", "loss"},
        "        return raw\n": {"part", "loss"},
        "    def last():\n        return raw\n": {"part", "loss"},
    }
    for number, (reader, wanted) in enumerate(readers.items()):
        file = tmp_path / f"loop{number}.py"
        file.write_text(head + reader)
        assert of_one_round(str(file), 4) == wanted, reader


@each(
    "loop, is_each",
    [
        ("for value in stream():\n    loss(value).backward()", True),
        ("for epoch in range(3):\n    for value in stream():\n        loss(value).backward()", True),
        ("it = stream()\nfor epoch in range(3):\n    value = next(it)\n    loss(value).backward()", True),
        ("for value in stream():\n    kept.append(value)\n    if full(kept):\n        loss(kept).backward()", False),
        (
            "it = stream()\nfor epoch in range(3):\n    for _ in range(4):\n        next(it)\n    loss().backward()",
            False,
        ),
        ("for epoch in range(3):\n    for value in stream():\n        pass\n    loss().backward()", False),
    ],
)
def test_a_state_of_a_generator_is_detached_where_each_value_has_its_backward(loop, is_each, tmp_path):
    head = "def stream():\n    h = start()\n    while True:\n        h = cell(h)\n        yield h\n"
    file = tmp_path / "program.py"
    file.write_text(head + loop + "\n")
    lines = (head + loop).split("\n")
    taken = next(n for n, line in enumerate(lines, 1) if n > 5 and ("in stream()" in line or "next(" in line))
    used = next(n for n, line in enumerate(lines, 1) if ".backward()" in line)
    at = (Frame(str(file), line, "<module>") for line in (taken, used))
    change = detach_after_yield(Frame(str(file), 4, "stream"), {"h": "tensor"}, next(at), [next(at)])
    assert (change is not None and "h = h.detach()" in change.new) == is_each


@each(
    ("first", "second", "joined"),
    [
        ("a.backward()", "b.backward()", "(a + b).backward()"),
        ("a.backward(retain_graph=True)", "b.backward()", "(a + b).backward()"),
        ("runner.backward(a)", "runner.backward(b)", "runner.backward(a + b)"),
        ("scaler.scale(a).backward()", "scaler.scale(b).backward()", "scaler.scale(a + b).backward()"),
        ('runner.backward(a["loss"])', "runner.backward(0.1 * b)", 'runner.backward(a["loss"] + 0.1 * b)'),
        ("(a / 2).backward()", "b.backward()", "(a / 2 + b).backward()"),
        ("a.backward()", "f(b).backward()", None),
        ("a.backward()", "(b + c).backward()", None),
        ("a.backward(); a = f(b)", "b.backward()", None),
        ("scaler.scale(a).backward()", "b.backward()", None),
        ("one.backward(a)", "other.backward(b)", None),
        ("a.backward(seed)", "b.backward()", None),
        ("optimizer.scale(a)", "optimizer.scale(b)", None),
        ("learn(a)", "learn(b)", None),
    ],
)
def test_backwards_of_two_losses_are_joined_where_both_are_called_alike(tmp_path, first, second, joined):
    file = tmp_path / "loop.py"
    file.write_text(f"def step(a, b):\n    {first}\n    {second}\n")
    ends = [4 + len(one) for one in (first, second)]
    frames = [Frame(str(file), at, "step", 5, at, end + 1, is_user=True) for at, end in zip((2, 3), ends, strict=True)]
    lines = backward_of_sum(*frames)
    assert [text.strip() for _, _, text in lines] == ([] if joined is None else ["", joined])


@each(
    ("computed", "again"),
    [
        ("a, b = f(net), g(net)", ["b = g(net)"]),
        ("a, c, b = f(net), h(net), g(net)", ["c, b = h(net), g(net)"]),
        ("a, b = both(net)", ["a, b = both(net)"]),
        ("a, b = f(net), g(net)\n    b = b + a", ["a, b = f(net), g(net)", "b = b + a"]),
    ],
)
def test_of_a_statement_that_computes_two_losses_only_the_needed_one_is_run_again(tmp_path, computed, again):
    file = tmp_path / "loop.py"
    lines = ["def step(net, c):", *f"    {computed}".split("\n"), "    opt.step()", "    learn(b, c)"]
    file.write_text("\n".join(lines) + "\n")
    at = [
        Frame(str(file), line, "step", 5, line, len(lines[line - 1]) + 1, True)
        for line in (2, len(lines) - 1, len(lines))
    ]
    first, *_ = run_again([at[0]], [[at[1]]], [at[2]])
    assert [one.strip() for _, _, text in first for one in text.split("\n")] == ["opt.step()", *again]
