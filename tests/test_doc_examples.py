"""Programs, commands and output in the documentation, run in both languages."""

from __future__ import annotations

import ast
import os
import re
import sys
import traceback
from pathlib import Path

import pytest

from example_programs import ROOT
from forked import warm_commands
from gradsan.cli import parse
from gradsan.options import OptionsError, file_layer

sys.path.insert(0, str(ROOT / "tools"))
import doc_examples as examples

from cases import each

DOCS = ROOT / "docs"
PAGES = [page for page in examples.pages() if page.name not in ("architecture.md", "dependencies.md", "internals.md")]
ENGLISH = [page for page in PAGES if not page.name.endswith(".zh.md")]
LONG = (".zh.md", "compare.md")
"""Chinese pages run the commands of the English ones; what compare.md compiles is what tests of the command compile."""
COUNTED_ELSEWHERE = "blind-spots"
"""Its programs run in test_blind_spots.py, which knows what each is to do."""


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def chinese(page: Path) -> Path:
    return page.with_suffix(".zh.md")


def with_console(page: Path) -> bool:
    """Whether a page has commands worth running: Chinese ones, which are the English ones, for their output."""
    texts = [block.text for block in examples.blocks(page) if block.language == "console"]
    shows_output = any(not line.startswith("$ ") for text in texts for line in text.splitlines())
    return shows_output if page.name.endswith(".zh.md") else bool(texts)


def runs_by_itself() -> list[object]:
    return [
        pytest.param(program, id=f"{name(page)}-{number}")
        for page in PAGES
        if not page.name.startswith(COUNTED_ELSEWHERE)
        for number, program in enumerate(examples.programs(page), 1)
    ]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="the pages show columns, which Python knows since 3.11")
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=pytest.mark.long if page.name.endswith(LONG) else (), id=name(page))
        for page in PAGES
        if with_console(page)
    ],
)
def test_commands_write_what_the_page_shows(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # In another locale Python has to start anew.
    warm = None if page.name.endswith(".zh.md") or not hasattr(os, "pidfd_open") else warm_commands()
    if warm is not None:
        # For the processes in which a search for fixes runs a program, and for ranks.
        for variable in ("WARM_PYTHON", "PYTHON_EXEC"):
            monkeypatch.setenv(variable, str(warm / "python"))
        if "gradsan compare" in page.read_text(encoding="utf-8"):
            monkeypatch.setenv("WARM_KIND", "compiled commands")
    assert "\n\n".join(map(str, examples.differences(page, tmp_path, warm))) == ""


@each("program", runs_by_itself())
def test_programs_do_what_their_comments_say(program: str) -> None:
    expected = [number for number, line in enumerate(program.splitlines(), 1) if "# RuntimeError" in line]
    try:
        exec(compile(program, "<page>", "exec"), {"__name__": "page"})
    except RuntimeError as error:
        frames = traceback.extract_tb(error.__traceback__)
        assert [frame.lineno for frame in frames if frame.filename == "<page>"] == expected
    else:
        assert expected == []


@each("page", [ROOT / "README.md", *PAGES], ids=name)
def test_shown_commands_exist_with_their_options(page: Path) -> None:
    refused = []
    for command in examples.shown_commands(page):
        words = command.split()
        if words[:1] == ["gradsan"]:
            try:
                assert parse(words[1:]).handler is not None
            except OptionsError as problem:
                refused.append((command, problem.message))
    assert refused == []


@each("page", PAGES, ids=name)
def test_shown_settings_exist(page: Path, tmp_path: Path) -> None:
    for block in examples.blocks(page):
        if block.language == "toml":
            (tmp_path / "pyproject.toml").write_text(block.text, encoding="utf-8")
            assert file_layer(tmp_path)


@each("page", PAGES, ids=name)
def test_files_that_a_page_gives_are_used(page: Path) -> None:
    commands = [
        line
        for other in PAGES
        if other == page or f"files_of: {page.relative_to(DOCS).as_posix()}\n" in other.read_text(encoding="utf-8")
        for line in examples.shown_commands(other)
    ]
    sources = [block.text for block in examples.blocks(page)]
    for title in (block.title for block in examples.blocks(page) if block.title is not None):
        imported = any(re.search(rf"^from {Path(title).stem} import", text, re.MULTILINE) for text in sources)
        # Read from where a command runs, without being named.
        is_settings = title == "pyproject.toml" and bool(commands)
        assert imported or is_settings or any(title in command for command in commands), title


@each("page", ENGLISH, ids=name)
def test_both_languages_show_the_same(page: Path) -> None:
    def outline(one: Path) -> list[int]:
        text = re.sub(r"^```.*?^```$", "", one.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        return [len(marks) for marks in re.findall(r"^(#+) ", text, re.MULTILINE)]

    def code(one: Path) -> list[str]:
        found = [block for block in examples.blocks(one) if block.language == "python"]
        return [f"{block.title} {ast.dump(ast.parse(block.text))}" for block in found]

    other = chinese(page)
    assert outline(page) == outline(other)
    assert examples.shown_commands(page) == examples.shown_commands(other)
    if not page.name.startswith(COUNTED_ELSEWHERE):
        assert code(page) == code(other)


@each(
    ("shown", "came", "fit"),
    [
        ("a\nb\n", "a\nb\n", True),
        ("a\nb\n", "a\nc\n", False),
        ("a\n", "a\nb\n", False),
        ("a\n…\nd\n", "a\nb\nc\nd\n", True),
        ("a\n…\nd\n", "a\nd\n", True),
        ("a\n…\nd\n", "a\nd\ne\n", False),
        ("in … s\n", "in 4.2 s\n", True),
        ("in … s\n", "in 4.2 min\n", False),
        ("a.c\n", "abc\n", False),
    ],
)
def test_shown_output_matches_real_output(shown: str, came: str, fit: bool) -> None:
    assert examples.fits(shown, came) == fit


def test_a_difference_is_shown(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    text = '```python title="said.py"\nprint("yes")\n```\n'
    text += "```console\n$ python said.py\nno\n$ exit 2\n$ echo $?\n2\n```\n"
    page.write_text(text, encoding="utf-8")
    (tmp_path / "run").mkdir()
    wrong, refused = examples.differences(page, tmp_path / "run")
    assert (wrong.command, wrong.shown, wrong.came) == ("python said.py", "no\n", "yes\n")
    assert text[wrong.start : wrong.end] == "no\n"
    assert refused.command == "exit 2"
