"""``gradsan report``: JSON in, every form out, and one sentence for what cannot be done."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from side_by_side import Runner

from cases import each
from forked import warm_python

PROGRAM = """\
import torch

weight = torch.ones(3, requires_grad=True)
curve = torch.exp(weight)
curve += 1
curve.sum().backward()
"""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> str:
    from side_by_side import run_process

    folder = tmp_path_factory.mktemp("recorded")
    (folder / "broken.py").write_text(PROGRAM)
    words = ("-m", "gradsan", "run", "--quiet", "--json", "report.json", "broken.py")
    assert run_process(words, folder, {"GRADSAN_TEXT": "strict"}, "", is_warm=True).status == 1
    return (folder / "report.json").read_text(encoding="utf-8")


@pytest.fixture
def folder(tmp_path: Path, recorded: str) -> Path:
    """The report alone: the program is not there any more."""
    (tmp_path / "report.json").write_text(recorded, encoding="utf-8")
    return tmp_path


def test_text_is_what_the_run_showed(folder: Path, tmp_path: Path, run_warm: Runner) -> None:
    shown = run_warm("report", "report.json")
    assert (shown.status, shown.stderr) == (0, "")
    elsewhere = tmp_path / "there"
    elsewhere.mkdir()
    (elsewhere / "broken.py").write_text(PROGRAM)
    ran = run_warm("run", "broken.py", cwd=elsewhere).stderr
    advice = "gradsan: 2 fixes can be tried without changing a file: gradsan fix broken.py\n"
    assert shown.stdout + advice == ran[ran.index("error[GS101]") :]


def test_json_is_the_same_again(folder: Path, recorded: str, run_warm: Runner) -> None:
    assert run_warm("report", "report.json", "--json").stdout == recorded


@each(
    ("form", "part"),
    [
        ("--text", "error[GS101]"),
        ("--html", "<!doctype html>"),
        ("--sarif", '"version": "2.1.0"'),
        ("--github", "::error file=broken.py,line=6,endLine=6,"),
        ("--json", '"schema": "gradsan.report/1"'),
    ],
)
def test_each_form_goes_to_the_output_or_to_a_file(folder: Path, form: str, part: str, run_warm: Runner) -> None:
    shown = run_warm("report", "report.json", form)
    assert (shown.status, shown.stderr) == (0, "")
    assert part in shown.stdout
    written = run_warm("report", form, "-o", "out", "report.json")
    assert (written.status, written.stdout, written.stderr) == (0, "", "")
    assert (folder / "out").read_text(encoding="utf-8") == shown.stdout


def test_the_source_is_that_of_the_run(folder: Path, run_warm: Runner) -> None:
    (folder / "broken.py").write_text("# another program\n" * 9)
    for form in ("--text", "--html", "--sarif"):
        shown = run_warm("report", "report.json", form).stdout
        assert "torch.exp(weight)" in shown
        assert "another program" not in shown


def test_several_files_are_merged(folder: Path, recorded: str, run_warm: Runner) -> None:
    (folder / "rank1.json").write_text(recorded, encoding="utf-8")
    shown = run_warm("report", "report.json", "rank1.json").stdout
    assert "(2 times)" in shown
    assert "2 of 2 reports have this; it came first in report.json, after 0 optimizer steps" in shown
    assert "1 error, 0 warnings; watched 6 saves" in shown
    merged = json.loads(run_warm("report", "report.json", "rank1.json", "--json").stdout)
    assert merged["diagnoses"][0]["sources"] == ["report.json", "rank1.json"]
    again = run_warm("report", "report.json", "report.json", "--json")
    assert again.stdout == recorded, "the same file twice is one file"


def test_words_of_its_own_are_in_the_language_asked_for(folder: Path, run_warm: Runner) -> None:
    shown = run_warm("report", "--lang", "zh", "report.json").stdout
    assert "错误[GS101]" in shown
    assert "the result of exp was overwritten" in shown, "sentences of the report stay as they are"


@each(
    ("words", "part"),
    [
        (["nothing.json"], "nothing.json cannot be read: No such file or directory"),
        (["."], ". cannot be read: Is a directory"),
        (["text"], "text is not JSON: "),
        (["other.json"], "other.json is not a gradsan report: it has no field `schema`"),
        (["newer.json"], "newer.json has the schema gradsan.report/9; this version of gradsan reads gradsan.report/1"),
        (["broken.json"], "broken.json is marked as a gradsan report, but does not keep its form: "),
        (["report.json", "nothing.json"], "nothing.json cannot be read"),
        (["report.json", "-o", "no/such/out"], "no/such/out cannot be written: No such file or directory"),
        (["report.json", "--html", "--text"], "--text"),
        (["report.json", "--pdf"], "--pdf"),
        ([], "FILE"),
    ],
)
def test_impossible_requests_give_one_sentence(folder: Path, words: list[str], part: str, run_warm: Runner) -> None:
    (folder / "text").write_text("hello")
    (folder / "other.json").write_text('{"x": 1}')
    (folder / "newer.json").write_text('{"schema": "gradsan.report/9"}')
    (folder / "broken.json").write_text('{"schema": "gradsan.report/1", "diagnoses": 3}')
    shown = run_warm("report", *words, env={"TMPDIR": str(folder)})
    assert shown.status == 2
    assert shown.stdout == ""
    assert shown.stderr.startswith("gradsan: ")
    assert shown.stderr.count("\n") == 1
    assert part in shown.stderr


def test_it_imports_no_torch(folder: Path, run_python: Runner) -> None:
    program = (
        "import sys, gradsan.cli\n"
        "status = gradsan.cli.main(['report', 'report.json', '--html'])\n"
        "sys.exit(3 if 'torch' in sys.modules else status)"
    )
    assert run_python("-c", program).status == 0


def test_a_run_writes_every_form(tmp_path: Path, run_warm: Runner) -> None:
    (tmp_path / "broken.py").write_text(PROGRAM)
    ran = run_warm("run", "--html", "r.html", "--sarif", "r.sarif", "--json", "r.json", "--github", "broken.py")
    assert ran.status == 1
    assert "error[GS101]" in ran.stderr
    assert ran.stdout.startswith("::error file=broken.py,line=6,")
    for form in ("html", "sarif", "github"):
        again = run_warm("report", "r.json", f"--{form}")
        expected = ran.stdout if form == "github" else (tmp_path / f"r.{form}").read_text(encoding="utf-8")
        assert again.stdout == expected, form


def test_files_named_in_the_project_lie_beside_it(tmp_path: Path, run_warm: Runner) -> None:
    (tmp_path / "pyproject.toml").write_text('[tool.gradsan]\nhtml = "out.html"\nsarif = "out.sarif"\n')
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "broken.py").write_text(PROGRAM)
    run_warm("run", "broken.py", cwd=tmp_path / "sub")
    assert (tmp_path / "out.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    assert (tmp_path / "out.sarif").exists()


def test_a_file_that_cannot_be_written_stops_before_the_program(tmp_path: Path, run_warm: Runner) -> None:
    (tmp_path / "main.py").write_text("print('the program has run')")
    ran = run_warm("run", "--html", "no/such/r.html", "main.py")
    assert (ran.status, ran.stdout) == (2, "")
    assert "no/such/r.html cannot be written" in ran.stderr


def test_works_where_the_working_directory_is_gone(folder: Path, run_python: Runner) -> None:
    program = (
        "import os, sys, tempfile, gradsan.cli\n"
        "gone = tempfile.mkdtemp()\n"
        "os.chdir(gone)\n"
        "os.rmdir(gone)\n"
        "sys.exit(gradsan.cli.main(['report', *sys.argv[1:]]))"
    )
    report, out = str(folder / "report.json"), str(folder / "out.html")
    assert run_python("-c", program, report, "--html", "-o", out).status == 0
    assert (folder / "out.html").exists()
    relative = run_python("-c", program, report, "-o", "out.html")
    assert (relative.status, relative.stderr.count("\n")) == (2, 1)


@pytest.mark.parametrize("words", [["report", "report.json", "--html"], ["run", "--quiet", "--github", "broken.py"]])
def test_a_reader_that_is_gone_is_no_failure(folder: Path, words: list[str]) -> None:
    (folder / "broken.py").write_text(PROGRAM)
    reading, writing = os.pipe()
    os.close(reading)
    python = warm_python()[0] if words[0] == "run" else sys.executable
    command = [python, "-m", "gradsan", *words]
    done = subprocess.run(
        command, cwd=folder, stdout=writing, stderr=subprocess.PIPE, text=True, check=False, timeout=120
    )
    os.close(writing)
    assert done.returncode == (1 if words[0] == "run" else 0)
    assert "BrokenPipe" not in done.stderr
    assert "gradsan:" not in done.stderr
