"""Buffers refreshed too early: new ones for the module, or the refresh after the backward; as text, and as searches."""

import textwrap

import pytest

from cases import each
from gradsan.model import Diagnosis, Frame, Label, Message, Site
from gradsan.repair import Limits, find_fixes
from gradsan.repair.fixes.states import renew_buffers
from gradsan.repair.fixes.steps import reorder_update
from gradsan.repair.patch import Patch
from gradsan.text import say

SETTING = 'setattr({0}.get_submodule({1}.rpartition(".")[0]), {1}.rpartition(".")[2], {2})'


@pytest.fixture
def suggested(tmp_path):
    """What becomes of a program of which ``writes`` are the writing lines, by number, with their operations."""

    def suggest(fix, text, writes, used=None, function="<module>"):
        file = tmp_path / "program.py"
        file.write_text(textwrap.dedent(text).lstrip("\n"))
        marks = [mark(file, "written", line, function, op) for line, op in writes]
        marks += [] if used is None else [mark(file, "used", used)]
        said = Message("title.any")
        found = fix(Diagnosis("GS112", "statistics_updated", "error", False, said, said, tuple(marks)))
        return [Patch().with_lines(fix.lines).files[str(file)].decode() for fix in found]

    return suggest


def mark(file, role, line, function="<module>", op=None):
    row = file.read_text().splitlines()[line - 1].partition("  #")[0]
    frame = Frame(str(file), line, function, len(row) - len(row.lstrip()) + 1, line, len(row) + 1, is_user=True)
    return Label(role, frame, Message("label.any"), op, Site((frame,)))


@each(
    ("head", "new_head", "name"),
    [
        ("for a in net.buffers():", "for (name, a) in net.named_buffers():", "name"),
        ("for a, b in zip(net.buffers(), b):", "for (name, a), b in zip(net.named_buffers(), b):", "name"),
        ("for k, a in net.named_buffers():", "for k, a in net.named_buffers():", "k"),
        (
            "for i, (b, (k, a)) in enumerate(zip(b, net.named_buffers())):",
            "for i, (b, (k, a)) in enumerate(zip(b, net.named_buffers())):",
            "k",
        ),
    ],
)
def test_a_module_is_given_what_was_written_into_its_buffers(suggested, head, new_head, name):
    program = f"{head}\n    a.mul_(0.9)\n    a += b\n    print(a)\n"
    (text,) = suggested(renew_buffers, program, [(2, "mul_"), (3, "add_")])
    given = SETTING.format("net", name, "a")
    assert text == f"{new_head}\n    a = a.mul(0.9)\n    a = a + b\n    {given}\n    print(a)\n"


def test_a_list_of_buffers_becomes_one_of_places(suggested):
    (text,) = suggested(
        renew_buffers,
        """
        class Sync:
            def __init__(self, net, source):
                self.pairs = [(a, b) for a, b in zip(net.buffers(), source.buffers()) if a.is_floating_point()]

            def __call__(self):
                for mine, theirs in self.pairs:
                    mine.lerp_(theirs, 0.1)
        """,
        [(7, "lerp_")],
        function="__call__",
    )
    assert text.splitlines()[2:] == [
        "        self.pairs = [((net, name), b) for (name, a), b in zip(net.named_buffers(), source.buffers())"
        " if a.is_floating_point()]",
        "",
        "    def __call__(self):",
        "        for (owner, place), theirs in self.pairs:",
        "            mine = owner.get_buffer(place)",
        "            mine = mine.lerp(theirs, 0.1)",
        "            " + SETTING.format("owner", "place", "mine"),
    ]


@each(
    "program",
    [
        "for a in net.parameters():\n    a.mul_(2)\n",
        "for a in make().buffers():\n    a.mul_(2)\n",
        "for a in net.buffers(recurse=False):\n    a.mul_(2)\n",
        "pairs = [a for a in net.buffers()]\nfor a in pairs:\n    a.mul_(2)\nprint(pairs)\n",
        "pairs = [a * 2 for a in net.buffers()]\nfor a in pairs:\n    a.mul_(2)\n",
        "for a in net.buffers():\n    a.data.mul_(2)\n",
    ],
)
def test_other_loops_are_left_alone(suggested, program):
    line = next(number for number, row in enumerate(program.split("\n"), 1) if "mul_" in row)
    assert suggested(renew_buffers, program, [(line, "mul_")]) == []


def test_a_refresh_goes_behind_the_backward(suggested):
    program = """
        loss = net(x).mean()
        refresh()  # each round
        print(loss)
        loss.backward()
        step()
    """
    assert suggested(reorder_update, program, [(2, "copy_")], used=4) == [
        "loss = net(x).mean()\nprint(loss)\nloss.backward()\nrefresh()  # each round\nstep()\n"
    ]


@each("write", ["loss = refresh(loss)", "loss.backward()", "if x: opt.step()", "net.p.grad.mul_(2)", "net; f()"])
def test_buffers_read_in_between_stay(suggested, write):
    program = f"loss = net(x).mean()\n{write}\nloss.backward()\n"
    assert suggested(reorder_update, program, [(2, "copy_")], used=3) == []


TEACHER = """
import torch
from torch import nn

torch.manual_seed(0)
student, teacher = (nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)) for _ in range(2))
teacher.eval()
optimizer = torch.optim.SGD([*student.parameters(), *teacher.parameters()], lr=0.1)


def refresh():
    with torch.no_grad():
        for mine, theirs in zip(teacher.buffers(), student.buffers()):
            if mine.is_floating_point():
                pass
            mine.copy_(theirs)


for _ in range(2):
    x = torch.randn(6, 3)
    wanted = teacher(x)
    loss = (student(x) - wanted).pow(2).mean()
    optimizer.zero_grad()
    refresh()
    {between}
    loss.backward()
    optimizer.step()
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("between", "meaning"),
    [
        ("pass", {"out_of_place": "preserved", "reorder_update": "preserved"}),
        # A refresh is not moved past what reads its statistics.
        ("loss = loss + teacher(x).mean()", {"out_of_place": "preserved"}),
    ],
    ids=["unread", "read"],
)
def test_a_refresh_too_early_is_mended(tmp_path, monkeypatch, between, meaning):
    (tmp_path / "main.py").write_text(TEACHER.replace("{between}", between))
    monkeypatch.chdir(tmp_path)
    found = find_fixes(("script", "main.py", ()), Limits(), lambda _: None, lambda m: say(m, "en"), tmp_path)
    (fault,) = found.diagnoses
    assert fault.code == "GS112"
    passed = {fix.kind: fix.meaning for fix in fault.fixes if fix.verification.status == "passed"}
    assert {kind: passed[kind] for kind in ("out_of_place", "reorder_update") if kind in passed} == meaning
    assert fault.fixes[0].meaning == "preserved"
    assert fault.fixes[0].verification.gradient_difference == 0
