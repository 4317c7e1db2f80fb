"""Wrong usage of ``gradsan``: one sentence, status 2, and the program has not run."""

from __future__ import annotations

from pathlib import Path

import pytest
from side_by_side import Outcome, Runner

from cases import each


def is_one_sentence(outcome: Outcome, *parts: str) -> bool:
    assert outcome.status == 2
    assert outcome.stdout == ""
    assert outcome.stderr.startswith("gradsan: ")
    assert outcome.stderr.count("\n") == 1
    for part in parts:
        assert part in outcome.stderr
    return True


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "main.py").write_text("print('the program has run')")
    (tmp_path / "empty").mkdir()
    return tmp_path


@each(
    ("words", "part"),
    [
        ([], "gradsan has: run, "),
        (["walk"], "'walk'"),
        (["--nothing"], "'--nothing'"),
        (["run"], "SCRIPT"),
        (["run", "--quiet"], "SCRIPT"),
        (["run", "--"], "SCRIPT"),
        (["run", "-m"], "-m needs a value"),
        (["run", "-c"], "-c needs a value"),
        (["run", "nothing.py"], "nothing.py cannot be opened: No such file or directory"),
        (["run", "main.py/x.py"], "main.py/x.py cannot be opened: Not a directory"),
        (["run", "empty"], "empty is a directory"),
        (["run", "empty/"], "__main__.py"),
        (["run", "--nothing", "main.py"], "no option --nothing"),
        (["run", "-x", "main.py"], "no option -x"),
        (["run", "--jso", "x", "main.py"], "no option --jso"),
        (["run", "--json"], "--json needs a value"),
        (["run", "--json", "--quiet", "main.py"], "--json needs a value"),
        (["run", "--json=", "main.py"], "json cannot be ''"),
        (["run", "--lang", "fr", "main.py"], "lang cannot be 'fr'; it takes en, zh or auto"),
        (["run", "--color", "red", "main.py"], "color cannot be 'red'; it takes auto, always or never"),
        (["run", "--exit-code", "256", "main.py"], "exit-code cannot be '256'; it takes a number from 0 to 255"),
        (["run", "--exit-code", "-1", "main.py"], "exit-code cannot be '-1'"),
        (["run", "--exit-code", "x", "main.py"], "exit-code cannot be 'x'"),
        (["run", "--quiet=yes", "main.py"], "--quiet"),
        (["run", "--json", "no/such/folder.json", "main.py"], "no/such/folder.json cannot be written: No such file"),
        (["run", "--json", "empty", "main.py"], "empty cannot be written: Is a directory"),
        (["run", "--json", "main.py/x", "main.py"], "main.py/x cannot be written: Not a directory"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_command_line(words: list[str], part: str, folder: Path, run_started: Runner) -> None:
    assert is_one_sentence(run_started(*words), part)


@each(
    ("setting", "part"),
    [
        ("colour=never", "in GRADSAN_OPTIONS: there is no option 'colour'; the options are "),
        ("quiet", "in GRADSAN_OPTIONS: 'quiet' is not of the form key=value"),
        ("lang=en:quiet=perhaps", "in GRADSAN_OPTIONS: quiet cannot be 'perhaps'; it takes true or false"),
        ("json=no/such/x.json", "no/such/x.json cannot be written"),
    ],
)
def test_environment(setting: str, part: str, folder: Path, run_gradsan: Runner) -> None:
    assert is_one_sentence(run_gradsan("run", "main.py", env={"GRADSAN_OPTIONS": setting}), part)


@each(
    ("table", "part"),
    [
        ("[tool.gradsan]\ncolour = 1", "pyproject.toml: there is no option 'colour'"),
        ("[tool.gradsan]\nexit-code = true", "pyproject.toml: exit-code cannot be True"),
        ("[tool.gradsan", "pyproject.toml cannot be read: "),
        ("[tool]\ngradsan = 3", "pyproject.toml: gradsan cannot be 3; it takes a table"),
    ],
)
def test_file(table: str, part: str, folder: Path, run_gradsan: Runner) -> None:
    (folder / "pyproject.toml").write_text(table)
    assert is_one_sentence(run_gradsan("run", "main.py"), part)


def test_chinese(folder: Path, run_gradsan: Runner) -> None:
    for words, env in (
        (["run", "--lang", "zh", "nothing.py"], {}),
        (["run", "--lang=zh", "nothing.py"], {}),
        (["run", "nothing.py"], {"GRADSAN_OPTIONS": "quiet=1:lang=zh"}),
        (["run", "nothing.py"], {"LC_ALL": "zh_CN.UTF-8"}),
    ):
        assert is_one_sentence(run_gradsan(*words, env={"PYTHONIOENCODING": "utf-8", **env}), "无法打开 nothing.py")


def test_help_and_version(run_gradsan: Runner) -> None:
    for words in (["--help"], ["run", "--help"], ["explain", "-h"], ["--version"]):
        outcome = run_gradsan(*words)
        assert (outcome.status, outcome.stderr) == (0, "")
    help_text = run_gradsan("run", "-h").stdout
    for option in ("--json FILE", "--lang LANG", "--color WHEN", "--stacks", "--quiet", "--exit-code N"):
        assert option in help_text
    chinese = run_gradsan("run", "-h", env={"LC_ALL": "zh_CN.UTF-8", "PYTHONIOENCODING": "utf-8"}).stdout
    assert "用法：" in chinese
    assert "options:" not in chinese


def test_no_torch_is_imported_by_the_command_line(run_python: Runner) -> None:
    code = (
        "import sys; from gradsan import cli; status = cli.main(['explain'])\n"
        "from gradsan.cli import run\n"
        "sys.exit(status or 'torch' in sys.modules)"
    )
    assert run_python("-c", code).status == 0
