import pytest
from rich.cells import cell_len
from rich.text import Text
from sample_reports import REPORTS, SOURCES

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


@pytest.mark.parametrize("name", REPORTS)
def test_colour_changes_nothing_but_colour(name, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    coloured = render(name, color=True)
    assert "\x1b[" in coloured
    assert Text.from_ansi(coloured).plain.rstrip("\n") == render(name).rstrip("\n")


@pytest.mark.parametrize("name", REPORTS)
def test_no_colour_codes_even_where_the_environment_asks(name, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    assert "\x1b" not in render(name)
