import argparse
import io
import itertools
import os
import re
import subprocess
import sys

import pytest
from rich.cells import cell_len

from cases import each
from gradsan.cli import explain
from gradsan.text import LANGUAGES, codes, page

ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


def run(*arguments):
    parser = argparse.ArgumentParser(prog="gradsan")
    explain.add_parser(parser.add_subparsers(), str)
    parsed = parser.parse_args(["explain", *arguments])
    return parsed.handler(parsed)


@pytest.fixture(autouse=True)
def plain_english(monkeypatch):
    for name in ("LC_ALL", "LC_MESSAGES", "LANG", "NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")


def program(*arguments, **environ):
    code = (
        "import argparse, sys\nfrom gradsan.cli import explain\n"
        "parser = argparse.ArgumentParser(prog='gradsan')\nexplain.add_parser(parser.add_subparsers(), str)\n"
        "parsed = parser.parse_args(sys.argv[1:])\nstatus = parsed.handler(parsed)\n"
        "assert 'torch' not in sys.modules\nsys.exit(status)"
    )
    return subprocess.run(
        [sys.executable, "-c", code, "explain", *arguments], capture_output=True, env={**os.environ, **environ}
    )


@each("language", LANGUAGES)
@each("entry", codes(), ids=lambda entry: entry.code)
def test_a_page_goes_to_a_pipe_as_it_is_written(capsys, language, entry):
    assert run(entry.code, "--lang", language) == 0
    out, err = capsys.readouterr()
    assert out == page(entry.code, language)
    assert err == ""


def pages_at_widths():
    """Every page where most lines break, and each third in turn at one of the widths where fewer do."""
    for number, (language, entry) in enumerate(itertools.product(LANGUAGES, codes())):
        yield language, entry, 30
        if number % 3 == 0:
            yield language, entry, (60, 80, 200)[number // 3 % 3]


@each("language, entry, columns", pages_at_widths())
def test_a_page_for_a_terminal_keeps_every_word_and_fits(capsys, monkeypatch, language, entry, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    assert run(entry.code, "--lang", language, "--color", "always") == 0
    out = capsys.readouterr().out
    assert ESCAPE.search(out)
    shown = ESCAPE.sub("", out)
    assert max(map(cell_len, shown.splitlines())) <= min(columns, 100)
    marks = re.compile(r"[\s#`*•\-]|^python$", re.MULTILINE)
    written = re.sub("```(python|console)", "```", page(entry.code, language))
    assert marks.sub("", shown) == marks.sub("", written)


def test_chinese_lines_are_filled(capsys):
    run("GS110", "--lang", "zh", "--color", "always")
    lines = [line.rstrip() for line in ESCAPE.sub("", capsys.readouterr().out).splitlines()]
    prose = [line for line in lines if re.match(r"[\u4e00-\u9fff]", line)]
    continued = [line for line, after in itertools.pairwise(lines) if line in prose and after.strip()]
    assert continued
    assert all(cell_len(line) > 60 for line in continued)


def test_slug_and_lower_case_are_accepted(capsys):
    assert run("gs111") == 0
    assert run("State_Carried_Over") == 0
    assert capsys.readouterr().out == page("GS111", "en") * 2


def test_an_unknown_code_is_one_sentence_and_status_2(capsys):
    assert run("GS999") == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "gradsan: there is no code GS999; `gradsan explain` lists the codes\n"


@each("language", LANGUAGES)
@each("color", ["always", "never"])
def test_the_list_has_every_code_with_its_title(capsys, monkeypatch, language, color):
    monkeypatch.setenv("COLUMNS", "120")
    assert run("--lang", language, "--color", color) == 0
    out = capsys.readouterr().out
    assert bool(ESCAPE.search(out)) == (color == "always")
    text = " ".join(ESCAPE.sub("", out).split())
    for entry in codes(language):
        assert f"{entry.code} {entry.slug}" in text
        assert all(word in text for word in entry.title.split())


def test_the_plain_list_is_aligned(capsys):
    run("--lang", "zh")
    lines = capsys.readouterr().out.splitlines()[: len(codes()) + 1]
    titles = [codes("zh")[0].title, codes("zh")[-1].title]
    rows = [lines[1], lines[-1]]
    assert len({cell_len(row[: row.index(title)]) for row, title in zip(rows, titles, strict=True)}) == 1
    assert cell_len(lines[0][: lines[0].index("发生了什么")]) == cell_len(rows[0][: rows[0].index(titles[0])])


def test_the_locale_chooses_the_language(capsys, monkeypatch):
    monkeypatch.setenv("LANG", "zh_CN.UTF-8")
    run("GS101")
    assert capsys.readouterr().out == page("GS101", "zh")


def test_a_terminal_gets_layout_by_default(capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    run("GS101")
    assert ESCAPE.search(capsys.readouterr().out)
    run("GS101", "--color", "never")
    assert capsys.readouterr().out == page("GS101", "en")
    monkeypatch.setenv("TERM", "dumb")
    run("GS101")
    assert capsys.readouterr().out == page("GS101", "en")


def test_no_color_keeps_layout_without_colours(capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("NO_COLOR", "1")
    run("GS101")
    out = capsys.readouterr().out
    assert "```" not in out
    assert not re.search(r"\x1b\[[0-9;]*3[0-7]", out)


@each("arguments", [["GS111"], ["GS111", "--color", "always"], []])
def test_torch_is_not_imported(arguments):
    done = program(*arguments)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout


@each("words", [["GS111", "--lang", "zh"], ["GS1110", "--lang", "zh"], ["--help"]])
@each("encoding", ["cp1252", "ascii"])
def test_a_stream_that_cannot_carry_chinese_gets_english(words, encoding):
    settings = {"PYTHONIOENCODING": encoding, "LC_ALL": "zh_CN.UTF-8"}
    done = program(*words, **settings)
    english = program(*words, **{**settings, "LC_ALL": "C"}) if words == ["--help"] else program(*words[:1], LC_ALL="C")
    assert (done.returncode, done.stdout, done.stderr) == (english.returncode, english.stdout, english.stderr)
    assert done.stdout or done.stderr


def test_a_reader_that_stops_early_is_no_failure():
    code = "from gradsan.cli.explain import _write; import sys\nfor _ in range(50): _write('x' * 100000, sys.stdout)"
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    child.stdout.read(10)
    child.stdout.close()
    assert child.wait() == 0
    assert child.stderr.read() == b""


def test_a_closed_stdout_is_no_failure(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    assert run("GS111") == 0


def test_a_message_leads_to_its_page_or_to_a_few(capsys, monkeypatch):
    assert run("grad", "can", "be", "implicitly", "created", "only", "for", "scalar", "outputs") == 0
    assert capsys.readouterr().out == page("GS408", "en")
    monkeypatch.setattr(sys, "stdin", io.StringIO("RuntimeError: Trying to backward through the graph\na second time"))
    assert run("-", "--lang", "zh") == 0
    shown = capsys.readouterr().out
    assert [line.split()[0] for line in shown.splitlines()[1:-1]] == ["GS401", "GS402", "GS404", "GS403"]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("GS11", "did you mean GS110, GS111, GS112"),
        ("GS11O", "did you mean GS110, GS111, GS112"),
        ("stat_carried_over", "state_carried_over"),
        ("CUDA out of memory", "no code explains"),
    ],
)
def test_unknown_topics_give_one_sentence(capsys, asked, said):
    assert run(asked) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert said in err
