"""gradsan in IPython: what a cell shows, as plain text and as HTML, and that nothing stays behind."""

import re
from html import unescape

import pytest

import gradsan

IPython = pytest.importorskip("IPython")
from IPython.core.interactiveshell import InteractiveShell  # noqa: E402
from IPython.utils.capture import capture_output  # noqa: E402

OVERWRITTEN = """\
import torch
w = torch.ones(3, requires_grad=True)
out = w.exp()
out += 1
out.sum().backward()
"""
CARRIED = """\
import torch
w = torch.ones(3, requires_grad=True)
h = torch.zeros(3)
for step in range(2):
    h = (h + w).tanh()
    h.sum().backward()
"""


@pytest.fixture
def shell(monkeypatch):
    monkeypatch.setenv("GRADSAN_TEXT", "strict")
    monkeypatch.setenv("GRADSAN_DEBUG", "1")
    monkeypatch.setenv("LC_ALL", "C.UTF-8")
    shell = InteractiveShell.instance()
    shell.reset(new_session=True)
    yield shell
    gradsan.uninstall()
    shell.run_line_magic("unload_ext", "gradsan")
    InteractiveShell.clear_instance()


def shown_by(shell, cell):
    """What running a cell prints, and the explanations that it displays, as (text, html)."""
    with capture_output() as captured:
        shell.run_cell(cell, store_history=True)
    displayed = [(one.data.get("text/plain", ""), one.data.get("text/html", "")) for one in captured.outputs]
    return captured.stdout + captured.stderr, [one for one in displayed if "GS" in one[0]]


def words(html):
    """What a reader of the page in the cell's frame sees."""
    (page,) = re.findall(r'srcdoc="([^"]*)"', html)
    body = re.sub(r"<(script|style).*?</\1>", " ", unescape(page), flags=re.DOTALL)
    return re.sub(r"\s+", " ", unescape(re.sub(r"<[^>]+>", "", body)))


def test_an_error_in_a_cell_is_explained_below_its_traceback(shell):
    shell.run_line_magic("load_ext", "gradsan")
    printed, ((text, html),) = shown_by(shell, OVERWRITTEN)
    assert "modified by an inplace operation" in printed
    assert text.startswith("error[GS101]")
    assert "┌─ In[1]:5:1" in text
    assert "<ipython-input" not in text + words(html)
    assert "In[1]" in words(html)
    assert "out += 1" in text
    assert "GS101" in words(html)
    assert "out += 1" in words(html)


def test_the_report_is_in_the_language_of_the_environment(shell, monkeypatch):
    monkeypatch.setenv("LC_ALL", "zh_CN.UTF-8")
    shell.run_line_magic("load_ext", "gradsan")
    _, ((text, html),) = shown_by(shell, OVERWRITTEN)
    assert text.startswith("错误[GS101]")
    assert "覆盖" in words(html)


def test_a_cell_defined_before_is_read_too(shell):
    shell.run_line_magic("load_ext", "gradsan")
    shown_by(shell, "def scaled(t):\n    kept = t.exp()\n    kept.mul_(2)\n    return kept\n")
    _, ((text, _),) = shown_by(shell, "import torch\nscaled(torch.ones(3, requires_grad=True)).sum().backward()")
    assert "kept.mul_(2)" in text


def test_errors_that_are_not_autograds_are_left_alone(shell):
    shell.run_line_magic("load_ext", "gradsan")
    printed, displayed = shown_by(shell, "{}['missing']")
    assert "KeyError" in printed
    assert displayed == []


@pytest.mark.parametrize("mode", ["", "deep"])
def test_a_watched_cell_shows_what_was_recorded(shell, mode):
    shell.run_line_magic("load_ext", "gradsan")
    printed, ((text, html),) = shown_by(shell, f"%%gradsan {mode}\n{CARRIED}")
    assert "backward through the graph a second time" in printed
    assert "error[GS401]" in text
    assert "carried over: h keeps" in words(html)
    assert "watched" in text
    assert not gradsan.record.recorder.recorder().is_on


def test_a_watched_cell_that_finishes_keeps_its_variables_and_says_so(shell):
    shell.run_line_magic("load_ext", "gradsan")
    with capture_output() as captured:
        shell.run_cell("%%gradsan\nimport torch\ntotal = torch.ones(3, requires_grad=True).sum()\ntotal.backward()")
    assert shell.user_ns["total"].item() == 3
    (shown,) = captured.outputs
    assert "0 errors" in shown.data["text/plain"]


def test_an_unknown_mode_runs_nothing(shell):
    shell.run_line_magic("load_ext", "gradsan")
    printed, displayed = shown_by(shell, "%%gradsan often\nran = True")
    assert "often" in printed
    assert displayed == []
    assert "ran" not in shell.user_ns


def test_unloading_leaves_the_shell_as_it_was(shell):
    before = (shell.custom_exceptions, shell.CustomTB)
    shell.run_line_magic("load_ext", "gradsan")
    shell.run_line_magic("unload_ext", "gradsan")
    assert (shell.custom_exceptions, shell.CustomTB) == before
    assert "gradsan" not in shell.magics_manager.magics["cell"]
    assert shown_by(shell, OVERWRITTEN)[1] == []


def test_a_handler_of_the_programs_own_keeps_its_exceptions(shell):
    met = []
    shell.set_custom_exc((KeyError,), lambda shell, kind, error, trace, tb_offset=None: met.append(kind))
    shell.run_line_magic("load_ext", "gradsan")
    shown_by(shell, "{}['missing']")
    assert met == [KeyError]
    assert len(shown_by(shell, OVERWRITTEN)[1]) == 1


def test_install_in_a_shell_is_the_same(shell):
    gradsan.install()
    assert len(shown_by(shell, OVERWRITTEN)[1]) == 1
    gradsan.uninstall()
    assert shown_by(shell, OVERWRITTEN)[1] == []
