"""Names that a statement binds and reads, and values that pass from one round to the next."""

from __future__ import annotations

import ast
import textwrap

from cases import each
from gradsan.model import Frame
from gradsan.source import assigned_names, carried_names, consumed_names, statement_at
from gradsan.source.rewrite.moving import names_exposed


@each(
    ("text", "expected"),
    [
        ("h = 1", ["h"]),
        ("a = b = c", ["a", "b"]),
        ("self.h, (x, *rest) = f()", ["self.h", "x", "rest"]),
        ("d['k'] = xs[-1] = v", ["d['k']", "xs[-1]"]),
        ("mem[i] = v", []),
        ("x += y", ["x"]),
        ("x: int = y", ["x"]),
        ("x: int", []),
        ("for i, x in xs: pass", ["i", "x"]),
        ("with f() as (a, b): h = 1", ["a", "b"]),
        ("print(y := f())", ["y"]),
        ("import a.b, c as d", ["a", "d"]),
        ("def f(): x = 1", ["f"]),
        ("hs.append(h)", []),
        ("del x", []),
        ("y = [q for q in xs]", ["y"]),
    ],
)
def test_assigned_names(text, expected):
    assert assigned_names(ast.parse(text).body[0]) == expected


@each(
    ("text", "expected"),
    [
        ("out, h = self.rnn(x[i], self.h)", ["self", "x", "i", "self.h"]),
        ("x += y", ["x", "y"]),
        ("mem[i] = v.w", ["v.w", "i"]),
        ("y = [f(q, h) for q in xs]", ["h", "xs"]),
        ("y = lambda q: q + h", ["h"]),
        ("if a: b = c", ["a"]),
        ("d['k'] = d['k'] + e[0][j]", ["d['k']", "e[0]", "j"]),
        ("y = f(g(x).h)", ["x"]),
    ],
)
def test_consumed_names(text, expected):
    assert consumed_names(ast.parse(text).body[0]) == expected


# Each snippet: "# read" marks the statement asked about, "# bound NAME" the lines expected for a name.
CARRIED = {
    "copied at the end": """
        for x in xs:
            out, h_next = rnn(x, h_cur)  # read
            loss(out).backward()
            h_cur = h_next  # bound h_cur
        """,
    "same statement": """
        def train():
            state = None
            for x in xs:
                seq, state = lstm(x, state)  # read, bound state
                loss(seq).backward()
        """,
    "same statement inside a condition": """
        for x in xs:
            if x.ok:
                seq, state = lstm(x, state)  # read, bound state
        """,
    "bound anew before it is read": """
        for x in xs:
            h = init()
            for t in x:
                o = f(h)  # read
                h = g(o)  # bound h
        """,
    "always bound before": """
        for x in xs:
            h = init()
            o = f(h)  # read
            h = g(o)
        """,
    "bound before on one path only": """
        for x in xs:
            if x.first:
                h = init()
            o = f(h)  # read
            h = g(o)  # bound h
        """,
    "bound before on both paths": """
        for x in xs:
            if x.first:
                h = init()
            else:
                h = other()
            o = f(h)  # read
            h = g(o)
        """,
    "attribute state across calls": """
        class Bank:
            def __init__(self):
                self.bank = make()
            def forward(self, x):
                self.bank = self.m * self.bank + (1 - self.m) * x  # read, bound self.bank
                return self.bank
        """,
    "attribute state set by another method": """
        class Net:
            def __init__(self):
                self.h = make()
            def forward(self, x):
                return self.cell(x, self.h)  # read
            def remember(self, h):
                self.h = h  # bound self.h
            def reset(self):
                self.h = None
        """,
    "attribute set before it is read": """
        class Net:
            def forward(self, x):
                self.h = init(x)
                return self.cell(x, self.h)  # read
            def remember(self, h):
                self.h = h
        """,
    "previous value in a loss": """
        for batch in loader:
            pose = net(batch)
            loss = criterion(pose, prev)  # read
            loss.backward()
            prev = pose  # bound prev
        """,
    "swapped in one statement": """
        while True:
            nxt = step(prev, cur)  # read
            prev, cur = cur, nxt  # bound prev, bound cur
        """,
    "detached is no bridge": """
        for x in xs:
            out, h = rnn(x, h)  # read
            h = h.detach()
        """,
    "detached in place is no bridge": """
        for x in xs:
            out, h = rnn(x, h)  # read
            h.detach_()
        """,
    "detached one by one is no bridge": """
        for x in xs:
            out, state = rnn(x, state)  # read
            state = tuple(s.detach() for s in state)
        """,
    "a helper that detaches": """
        for x in xs:
            out, state = rnn(x, state)  # read
            state = detach_all(state)
        """,
    "under no_grad": """
        for x in xs:
            y = f(x, ema)  # read
            with torch.no_grad():
                ema = 0.9 * ema + 0.1 * y
        """,
    "only numbers": """
        for x in xs:
            y = f(x, best)  # read
            best = y.item()
        """,
    "appended to a list": """
        for x in xs:
            y = f(x, memory[-1])  # read
            memory.append(y)  # bound memory[-1]
        """,
    "stored by index": """
        for i, x in enumerate(xs):
            y = f(x, mem)  # read
            mem[i] = y  # bound mem
        """,
    "in a dictionary": """
        def call(x, state):
            y = f(x, state['h'])  # read
            state['h'] = y  # bound state['h']
            return y
        """,
    "a parameter does not outlive the call": """
        def call(x, h):
            y = f(x, h)  # read
            h = y
            return y
        """,
    "global state": """
        def call(x):
            global h
            y = f(x, h)  # read
            h = y  # bound h
        """,
    "nonlocal state": """
        def outer():
            h = None
            def call(x):
                nonlocal h
                y = f(x, h)  # read
                h = y  # bound h
            return call
        """,
    "continue skips the binding, another takes its place": """
        for x in xs:
            y = f(x, h)  # read
            if x.skip:
                h = y * 2  # bound h
                continue
            h = y  # bound h
        """,
    "break takes the value out of the loop": """
        for x in xs:
            y = f(x, h)  # read
            if x.stop:
                h = y
                break
        """,
    "in a try": """
        for x in xs:
            y = f(x, h)  # read
            try:
                h = g(y)  # bound h
            except ValueError:
                h = None
            finally:
                log()
        """,
    "in a match": """
        for x in xs:
            y = f(x, h)  # read
            match x:
                case 1:
                    h = y  # bound h
                case _:
                    pass
        """,
    "walrus in a while": """
        while (h := step(h)) is not None:  # read, bound h
            pass
        """,
    "walrus in a comprehension": """
        ys = [h := cell(x, h) for x in xs]  # read, bound h
        """,
    "augmented": """
        for x in xs:
            h *= decay  # read
            h = h + x
            h *= 0.5  # bound h
        """,
    "accumulated loss": """
        for x in xs:
            total += loss(x)  # read, bound total
            total.backward()
        """,
    "counter of numbers": """
        for x in xs:
            y = f(x, step)  # read
            step += 1
        """,
    "after the loop nothing is carried any more": """
        for x in xs:
            loss = f(x)
        print(loss)  # read
        """,
    "an inner loop left behind is carried by the outer one": """
        for epoch in range(3):
            y = f(h)  # read
            for x in xs:
                h = g(x, y)  # bound h
        """,
    "the outer loop carries": """
        for epoch in range(3):
            for x in xs:
                y = f(x, h)  # read
            h = y  # bound h
        """,
    "what is made from nothing carries no graph": """
        for x in xs:
            y = f(x, noise, torch.cat([h]), drawn)  # read
            noise = torch.randn_like(x)
            h = make.zeros(y)  # bound h
            drawn = torch.normal(y)  # bound drawn
        """,
    "loop variables carry nothing": """
        for h in hs:
            y = f(h)  # read
        """,
    "another function of the same name binds nothing": """
        def a():
            for x in xs:
                y = f(x, h)  # read
        def b():
            h = 1
        """,
}


@each("name", CARRIED)
def test_carried(tmp_path, name):
    text = textwrap.dedent(CARRIED[name]).strip("\n") + "\n"
    path = tmp_path / "carried.py"
    path.write_text(text)
    lines = text.splitlines()
    expected = {
        (mark.split()[1], number)
        for number, line in enumerate(lines, 1)
        for mark in line.partition("# ")[2].split(", ")
        if mark.startswith("bound ")
    }
    read = next(number for number, line in enumerate(lines, 1) if "# read" in line)
    scope = _function_around(text, read)
    found = carried_names(Frame(str(path), read, scope))
    assert {(one.name, one.bound_at.line) for one in found} == expected
    for one in found:
        assert one.consumed_line == read
        assert statement_at(one.bound_at).node.lineno == one.bound_at.line


def _function_around(text, line):
    names = [
        (node.lineno, node.name)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef) and node.lineno <= line <= node.end_lineno
    ]
    return max(names)[1] if names else "<module>"


def test_notebook_cells_run_again(tmp_path):
    folder = tmp_path / "ipykernel_7"
    folder.mkdir()
    cell = folder / "123.py"
    cell.write_text("out, h = rnn(x, h)\n")
    assert [(one.name, one.bound_at.line) for one in carried_names(Frame(str(cell), 1, "<module>"))] == [("h", 1)]
    script = tmp_path / "train.py"
    script.write_text("out, h = rnn(x, h)\n")
    assert carried_names(Frame(str(script), 1, "<module>")) == []


def test_nothing_without_source():
    assert carried_names(Frame("<string>", 1, "f")) == []


@each(
    ("text", "exposed"),
    [
        ("a = b\nc = a", {"b"}),
        ("if a:\n    b = c\n    d(b)\nelse:\n    e = b", {"a", "b", "c", "d"}),
        ("if a:\n    b = c\nd = b", {"a", "b", "c"}),
        ("for a in b:\n    c = a\n    d(c)", {"a", "b", "c", "d"}),
    ],
)
def test_names_that_statements_read_of_before(text, exposed):
    assert names_exposed(ast.parse(text).body) == exposed
