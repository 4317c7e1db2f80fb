"""Losses cut off their graph, mended; states in objects and containers, detached once a round is over."""

from __future__ import annotations

from cases import each
from gradsan import source
from gradsan.model import Frame, Held, Layer


@each(
    ("text", "live", "kinds", "changed"),
    [
        ("loss = torch.tensor([a, b]).sum()", {"a": True, "b": True}, ["new_tensor"], "torch.stack([a, b]).sum()"),
        ("xs = [f(a)]\nloss = torch.tensor(xs, requires_grad=True)", {"a": True}, ["new_tensor"], "torch.stack(xs)"),
        # A number of each, of another type: stacked tensors would be something else.
        ("xs = [f(a)]\nloss = torch.tensor(xs, dtype=torch.float64)", {"a": True}, ["new_tensor"], None),
        ("xs = g(a)\nloss = torch.tensor(xs)", {"a": True}, ["new_tensor"], None),
        ("loss = torch.ones(1) * a.item()", {"a": True}, ["item"], "torch.ones(1) * a"),
        (
            "(g,) = torch.autograd.grad(a, w)\nloss = g.sum()",
            {"a": True},
            ["gradient"],
            "grad(a, w, create_graph=True)",
        ),
        ("(g,) = torch.autograd.grad(a, w, create_graph=True)\nloss = g.sum()", {"a": True}, [], None),
        # Nobody detaches by chance.
        ("loss = a.detach() * 2", {"a": True}, ["detach"], None),
        # The gradients of one are meant to be constants, those of the other are not.
        (
            "r = [g.detach() for g in torch.autograd.grad(b, w)]\ns = torch.autograd.grad(a, w)\nloss = dist(r, s)",
            {"a": True, "b": True},
            ["gradient", "gradient"],
            "s = torch.autograd.grad(a, w, create_graph=True)",
        ),
    ],
)
def test_the_only_cut_is_undone(text, live, kinds, changed, tmp_path):
    file = tmp_path / "train.py"
    text = f"import torch\n{text}\nloss.backward()\n"
    file.write_text(text)
    last = text.count("\n")
    frame = Frame(str(file), last, "<module>", 1, last, len("loss.backward()") + 1, is_user=True)
    cuts = source.find_cuts([frame], [source.Live(live)])
    assert [one.kind for one in cuts] == kinds
    open_cuts = [one for one in cuts if not one.is_covered]
    assert len(open_cuts) == min(len(kinds), 1)
    change = source.undone(open_cuts[0].frame, open_cuts[0].kind) if open_cuts else None
    assert (change is None) == (changed is None)
    assert change is None or changed in change.new


@each(
    ("path", "around", "line"),
    [
        ("store.values", [("store", "object", [])], "store.values = store.values.detach()"),
        (
            "ring.items[2]",
            [("ring", "object", []), ("ring.items", "list", ["none", "tensor"])],
            "ring.items = [s if s is None else s.detach() for s in ring.items]",
        ),
        (
            "memory[3][0]",
            [("memory", "deque", ["tuple"]), ("memory[3]", "tuple", ["other", "tensor"])],
            "memory = deque((tuple(s.detach() if torch.is_tensor(s) else s for s in part) for part in memory), "
            "memory.maxlen)",
        ),
        ('h["a"]', [("h", "dict", ["tensor"])], "h = {key: s.detach() for key, s in h.items()}"),
        # By the next round another object may have this place.
        (
            "agents[1].h",
            [("agents", "list", ["other"]), ("agents[1]", "object", [])],
            "for part in agents:\n        part.h = part.h.detach()",
        ),
        ('calls["ann"].h', [("calls", "dict", ["other"]), ('calls["ann"]', "object", [])], None),
        (
            'ends["left"].h',
            [("ends", "dict", ["other"]), ('ends["left"]', "object", [])],
            'ends["left"].h = ends["left"].h.detach()',
        ),
    ],
)
def test_held_states_are_detached_after_the_round(path, around, line, tmp_path):
    file = tmp_path / "train.py"
    file.write_text(
        "import torch\nmemory = deque(maxlen=9)\nwhile ends['left']:\n    loss.backward()\n    report(loss)\n"
    )
    layers = tuple(Layer(name, kind, tuple(items)) for name, kind, items in around)
    held = Held(path, str(file), "<module>", layers[-1].path, layers[-1].kind, is_old=True, around=layers)
    found = source.detach_held([Frame(str(file), 4, "<module>", is_user=True)], [held])
    assert (found is None) == (line is None)
    if found is not None and line is not None:
        assert (found[0].line, found[0].new.strip()) == (6, line)


@each(("asked", "form"), [("h", "{}.detach().requires_grad_()"), ("w", "{}.detach()")])
def test_inputs_of_autograd_grad_stay_leaves(asked, form, tmp_path):
    file = tmp_path / "train.py"
    file.write_text(f"h = f(h)\n(g,) = torch.autograd.grad(loss, [{asked}])\n")
    change = source.detach_at(Frame(str(file), 1, "<module>", is_user=True), "h")
    assert change is not None
    assert change.new == f"h = {form.format('f(h)')}"


@each(
    ("line", "function", "shared"),
    [
        (4, "forward", True),
        (5, "forward", False),
        (8, "code", True),
        (11, "once", False),
        (13, "<module>", False),
    ],
)
def test_a_cut_in_what_several_callers_run_reaches_all_of_them(line, function, shared, tmp_path):
    file = tmp_path / "train.py"
    file.write_text(
        """class Net(Module):
    def forward(self, x):
        if self.grid is None:
            y = self.layer(x)
            self.grid = y
        return y
def code(x):
    z = net(x)
    return z
def once(x):
    z = code(x)
    return z
kept = once(code(data))
"""
    )
    assert source.returns_to_several(Frame(str(file), line, function, is_user=True)) == shared


@each(
    ("call", "repeated"),
    [
        ("y = step(x)", False),
        ("y = [step(one) for one in x]", True),
        ("y = step(x) + step(x)", True),
        ("y = step(x)\n    z = step(y)", True),
        ("y = step(x)\n    z = other(y)", False),
    ],
)
def test_calls_that_a_round_repeats(call, repeated, tmp_path):
    file = tmp_path / "train.py"
    file.write_text(f"for x in data:\n    {call}\n    y.backward()\nstep(0)\n")
    column = call.index("step") + 5
    at = Frame(str(file), 2, "<module>", column, 2, column + call.count("x") + 6, is_user=True)
    used = Frame(str(file), 3 + call.count("\n"), "<module>", is_user=True)
    assert source.is_repeated(at, used) == repeated
