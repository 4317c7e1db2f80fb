import linecache
from dataclasses import replace

import pytest
from rich.cells import cell_len
from rich.text import Text
from sample_reports import REPORTS, SOURCES, bridge, report, words

from cases import each
from gradsan.model import Diagnosis, Fix, Frame, Label, Site, Verification
from gradsan.present import render_terminal


def render(name, **options):
    return render_terminal(
        REPORTS[name](), **{"language": "en", "color": False, "width": 100, "stacks": False, "cwd": SOURCES, **options}
    )


@pytest.mark.parametrize("name", REPORTS)
def test_english(name, golden):
    assert render(name) == golden


@pytest.mark.parametrize("name", REPORTS)
def test_chinese(name, golden):
    assert render(name, language="zh") == golden


@pytest.mark.parametrize("name", ["two_files", "several_lines", "long_line"])
def test_ascii(name, golden):
    shown = render(name, ascii=True)
    assert shown.isascii()
    assert shown == golden


@pytest.mark.parametrize("name", ["two_files", "same_line"])
def test_stacks(name, golden):
    assert render(name, stacks=True) == golden


@pytest.mark.parametrize("width", [40, 60])
def test_narrow(width, golden):
    shown = render("two_files", width=width)
    assert max(map(cell_len, shown.splitlines())) <= width
    assert shown == golden


@each("name", REPORTS)
def test_colour_changes_nothing_but_colour(name, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    coloured = render(name, color=True)
    assert "\x1b[" in coloured
    assert Text.from_ansi(coloured).plain.rstrip("\n") == render(name).rstrip("\n")


@each("name", REPORTS)
def test_no_colour_codes_even_where_the_environment_asks(name, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    assert "\x1b" not in render(name)


def draw_one(source, column, end_column, width=60):
    """The rows of a label on a line that exists only in linecache."""
    linecache.cache["<drawn>"] = (len(source), None, [f"{source}\n"], "<drawn>")
    message = words("result of {op}", op="x")
    shown = Label("used", Frame("<drawn>", 1, "f", column, 1, end_column, is_user=True), message)
    made = report(Diagnosis("GS101", "result_overwritten", "error", False, message, message, (shown,)))
    drawn = render_terminal(made, language="en", color=False, width=width, stacks=False, cwd=SOURCES)
    return drawn.splitlines()[2:4]


def test_a_mark_at_the_very_edge_stays_inside():
    columns = 60 - len(" 1 │ ")
    _, underline = draw_one("x" * columns + "\u0301", columns + 1, columns + 2)
    assert underline == "   │ " + " " * (columns - 1) + "^"


def test_control_characters_of_a_source_line_do_not_reach_the_terminal():
    row, underline = draw_one("a = '\x1b[31m' + b", 15, 16)
    assert row == " 1 │ a = '␛[31m' + b"
    assert underline.index("^") == row.index(" + b") + 3


@pytest.mark.parametrize(("other", "is_shown"), [("passed", False), ("failed", True), ("not_run", True)])
def test_a_failed_change_is_left_out_where_another_passed(other, is_shown):
    diff = "--- a/t.py\n+++ b/t.py\n@@ -1 +1 @@\n-y.relu_()\n+y = y.{name}()\n"
    fixes = tuple(
        Fix(
            "kind",
            "preserved",
            words("result of {op}", op=name),
            diff=diff.format(name=name),
            verification=Verification(how),
        )
        for name, how in (("relu", other), ("clone", "failed"))
    )
    made = report(replace(bridge().diagnoses[0], fixes=fixes))
    shown = render_terminal(made, language="en", color=False, width=100, stacks=False, cwd=SOURCES)
    assert all(one in shown for one in ("result of relu", "result of clone", "y = y.relu()"))
    assert ("y = y.clone()" in shown) is is_shown


def test_the_place_inside_of_a_library_is_shown():
    def shown(*inner, role="written"):
        (first, *_) = bridge().diagnoses
        frame = first.labels[0].frame
        inside = tuple(Frame(file, line, function) for file, line, function in inner)
        one = replace(first, labels=(replace(first.labels[0], role=role, site=Site((frame, *inside))),))
        return render_terminal(report(one), language="en", color=False, width=100, stacks=False, cwd=SOURCES)

    layer = ("/venv/lib/site-packages/zoo/layers/act.py", 12, "Bent.forward")
    torchs = ("/venv/lib/site-packages/torch/nn/functional.py", 900, "relu")
    assert "in zoo/layers/act.py:12, Bent.forward" in shown(torchs, layer, torchs)
    assert "act.py" not in shown(layer, role="used")
    assert "functional.py" not in shown(torchs)
    assert "in zoo.py:3, bend" in shown(("C:/site-packages/zoo.py", 3, "bend"))
