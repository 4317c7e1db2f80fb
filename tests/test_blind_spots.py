"""docs/blind-spots.md: every program in it does what the page says, plain and under gradsan."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch

import gradsan
from cases import each
from example_programs import ROOT, refresh_reports, run_program
from forked import run_forked, warm_python
from gradsan.model import Diagnosis
from gradsan.record.recorder import recorder

PAGE = ROOT / "docs" / "blind-spots.md"
VERSION_ERROR = "one of the variables needed for gradient computation has been modified by an inplace operation"
IN_THE_CHILD = "version error in the child"
ROLES = ("saved", "written", "used", "suspect")


class Entry(NamedTuple):
    title: str
    program: str
    torch_says: str
    gradsan_says: str


def entries() -> list[Entry]:
    found = re.findall(
        r"^#+ ([^\n]+)\n(?:(?!^#)[^\n]*\n)*?```python\n(.*?)```\n\nPyTorch: (.+?)\. gradsan: (.+?)\.\n",
        PAGE.read_text(encoding="utf-8"),
        re.MULTILINE | re.DOTALL,
    )
    return [Entry(*entry) for entry in found]


ENTRIES = [entry for entry in entries() if entry.torch_says != IN_THE_CHILD]


class Outcome(NamedTuple):
    variables: dict[str, Any]
    error: Exception | None
    diagnoses: tuple[Diagnosis, ...]


def execute(entry: Entry, file: Path, *, watch: bool = True) -> Outcome:
    """Run a program of the page, under gradsan (which it may switch on itself) or plain."""
    # An operator can be registered once in a process.
    program = entry.program if watch else entry.program.replace("blind_spots::", "plain::")
    file.write_text(program, encoding="utf-8")
    code = compile(program, str(file), "exec")
    # Threads and storages get the numbers of earlier ones again; in one program that is rare, here it is the rule.
    recorder().core.clear()
    variables: dict[str, Any] = {"__name__": "program"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if not watch:
            return Outcome(variables, run(code, variables), ())
        if "import gradsan" in program:
            error = run(code, variables)
            return Outcome(variables, error, variables["watched"].diagnoses)
        with gradsan.watch() as watched:
            error = run(code, variables)
    return Outcome(variables, error, watched.diagnoses)


def run(code: Any, variables: dict[str, Any]) -> Exception | None:
    try:
        exec(code, variables)
    except Exception as error:
        return error
    return None


def marked_line(entry: Entry, mark: str) -> int:
    [line] = [number for number, text in enumerate(entry.program.splitlines(), 1) if f"# {mark}" in text]
    return line


def check_torch(entry: Entry, outcome: Outcome) -> None:
    if entry.torch_says == "no error, wrong gradient":
        assert outcome.error is None
        assert not torch.allclose(outcome.variables["got"], outcome.variables["right"])
        return
    is_caught = entry.torch_says.endswith(", caught")
    error = outcome.variables["caught"] if is_caught else outcome.error
    assert outcome.error is None or not is_caught
    assert isinstance(error, RuntimeError)
    assert str(error).startswith(VERSION_ERROR) == (entry.torch_says == "version error")


def check_gradsan(entry: Entry, diagnoses: tuple[Diagnosis, ...]) -> None:
    code, _, rest = entry.gradsan_says.partition(", ")
    assert [found.code for found in diagnoses] == ([] if code == "nothing" else [code])
    if code == "nothing":
        assert rest == ""
        return
    lines = {role: [label.frame.line for label in diagnoses[0].labels if label.role == role] for role in ROLES}
    if rest == "no suspect":
        assert lines["suspect"] == lines["written"] == []
    elif rest == "the writing line among the suspects":
        assert marked_line(entry, "the write") in lines["suspect"]
        assert lines["written"] == []
    elif rest == "without the line of the save":
        assert lines["saved"] == []
        assert lines["written"] == [marked_line(entry, "the write")]
    else:
        assert rest == "every place the call"
        assert {line for found in lines.values() for line in found} == {marked_line(entry, "the call")}


@each("entry", ENTRIES, ids=lambda entry: entry.title)
def test_a_program_of_the_page_does_what_the_page_says(entry: Entry, tmp_path: Path) -> None:
    outcome = execute(entry, tmp_path / "program.py")
    check_torch(entry, outcome)
    check_gradsan(entry, outcome.diagnoses)


@each("entry", [entry for entry in ENTRIES if "import gradsan" not in entry.program], ids=lambda entry: entry.title)
def test_pytorch_says_the_same_without_gradsan(entry: Entry, tmp_path: Path) -> None:
    check_torch(entry, execute(entry, tmp_path / "program.py", watch=False))


def test_a_child_without_the_environment_is_named(tmp_path: Path) -> None:
    [entry] = [entry for entry in entries() if entry.torch_says == IN_THE_CHILD]
    (tmp_path / "program.py").write_text(entry.program, encoding="utf-8")
    program, report = str(tmp_path / "program.py"), tmp_path / "report.json"
    words, environment = refresh_reports.gradsan_command(program, options=("--json", str(report)))
    done = run_forked(words, ROOT, {**environment, **warm_python()[1]})
    assert f"RuntimeError: {VERSION_ERROR}" in done.stderr
    assert done.returncode == run_program(program).returncode == 0
    assert refresh_reports.report_in(done.stderr) == ""
    assert entry.gradsan_says == "nothing"
    written = json.loads(report.read_text(encoding="utf-8"))
    assert written["diagnoses"] == []
    [spot] = written["seen"]["blind_spots"]
    assert "python -c import torch" in spot
    assert "was not watched" in spot


def test_every_program_of_the_page_is_an_entry() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert [entry.program for entry in entries()] == re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len({entry.title for entry in entries()}) == len(entries()) == text.count("gradsan: ")
