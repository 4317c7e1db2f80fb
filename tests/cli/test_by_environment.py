"""``GRADSAN=1`` before a command: the findings are those of ``gradsan run``, whatever starts the program."""

from __future__ import annotations

import json
import os
import sys
import textwrap
from pathlib import Path

import pytest
from side_by_side import Runner

import gradsan_start

PROGRAM = """\
import multiprocessing, sys
import torch

def silent():
    weight = torch.ones(3, requires_grad=True)
    curve = torch.exp(weight)
    curve.data.add_(1)
    curve.sum().backward()

if __name__ == "__main__":
    silent()
    if "spawn" in sys.argv:
        child = multiprocessing.get_context("spawn").Process(target=silent)
        child.start()
        child.join()
    weight = torch.ones(3, requires_grad=True)
    curve = torch.exp(weight)
    curve += 1
    curve.sum().backward()
"""
RIGHT = "import torch\nw = torch.ones(3, requires_grad=True)\n(w * 2).sum().backward()\nprint(w.grad)\n"


def findings(file: Path) -> list[tuple[str, int, list[tuple[str, int]]]]:
    told = json.loads(file.read_text(encoding="utf-8"))["diagnoses"]
    return sorted(
        (one["code"], one["count"], [(label["role"], label["line"]) for label in one["labels"]]) for one in told
    )


def environment(folder: Path, asked: str | None, out: str) -> dict[str, str]:
    options = {"GRADSAN_OPTIONS": f"json={out}:lang=en", "GRADSAN_TEXT": "strict", "TMPDIR": str(folder)}
    return options if asked is None else {**options, "GRADSAN": asked}


@pytest.mark.parametrize("words", [[], ["spawn"]], ids=["alone", "with a spawned child"])
def test_python_finds_what_gradsan_run_finds(
    tmp_path: Path, run_python: Runner, run_gradsan: Runner, words: list[str]
) -> None:
    (tmp_path / "main.py").write_text(PROGRAM, encoding="utf-8")
    asked = run_python("main.py", *words, env=environment(tmp_path, "1", "asked.json"))
    run_gradsan("run", "main.py", *words, env=environment(tmp_path, None, "run.json"))
    assert findings(tmp_path / "asked.json") == findings(tmp_path / "run.json")
    assert len(findings(tmp_path / "asked.json")) == 2
    assert asked.status == 1
    traceback, _, report = asked.stderr.rpartition("RuntimeError: ")
    assert "/src/gradsan/" not in traceback
    assert [part for part in ("error[GS202]", "error[GS101]", "2 errors") if part not in report] == []


def test_pytest_and_torchrun_find_what_python_finds(tmp_path: Path, run_python: Runner) -> None:
    (tmp_path / "test_it.py").write_text(
        f"import torch\n\ndef test_it():{PROGRAM.partition('def silent():')[2].partition('if __name')[0]}",
        encoding="utf-8",
    )
    env = environment(tmp_path, "1", "tests.json")
    done = run_python("-m", "pytest", "-q", "-p", "no:cacheprovider", "test_it.py", env=env)
    assert (done.status, [code for code, *_ in findings(tmp_path / "tests.json")]) == (0, ["GS202"]), done.stderr
    (tmp_path / "main.py").write_text(PROGRAM, encoding="utf-8")
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port=0", "main.py")
    done = run_python(*torchrun, env=environment(tmp_path, "deep", "ranks.json"))
    assert done.status == 1
    assert {code for code, *_ in findings(tmp_path / "ranks.json")} == {"GS101", "GS202"}
    assert done.stderr.count("error[GS101]") == 1, "both ranks' findings are told once"


def test_a_notebook_has_the_note_and_the_report(tmp_path: Path, run_python: Runner) -> None:
    pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    cells = ["import torch", "w = torch.ones(3, requires_grad=True)\nh = torch.exp(w)\nh += 1\nh.sum().backward()"]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    nbformat.write(notebook, tmp_path / "in.ipynb")
    program = """
        import nbformat, sys
        from nbclient import NotebookClient
        notebook = nbformat.read("in.ipynb", 4)
        NotebookClient(notebook, allow_errors=True, timeout=100).execute()
        print("".join(notebook.cells[1].outputs[0].traceback))
    """
    env = {**environment(tmp_path, "1", "cells.json"), "HOME": str(tmp_path)}
    done = run_python("-c", textwrap.dedent(program), env=env)
    assert "error[GS101]" in done.stdout, done.stderr
    assert [code for code, *_ in findings(tmp_path / "cells.json")] == ["GS101"]


def test_a_right_program_is_the_same_but_for_a_line(tmp_path: Path, run_python: Runner) -> None:
    (tmp_path / "main.py").write_text(RIGHT, encoding="utf-8")
    plain = run_python("main.py")
    asked = run_python("main.py", env={"GRADSAN": "1", "TMPDIR": str(tmp_path)})
    assert (asked.stdout, asked.status) == (plain.stdout, 0)
    assert asked.stderr.count("\n") <= 1
    assert not asked.stderr or asked.stderr.startswith("gradsan: nothing found")


def test_what_is_not_understood_or_left_out_is_said_once(tmp_path: Path, run_python: Runner) -> None:
    wrong = run_python("-c", "import torch", env={"GRADSAN": "depp"})
    assert wrong.stderr.startswith("gradsan: GRADSAN is 'depp'")
    alone = run_python("-c", "import torch", env={"GRADSAN_OPTIONS": "lang=en"})
    assert alone.stderr.startswith("gradsan: GRADSAN_OPTIONS is set, but nothing asked")
    assert [done.stderr.count("\n") for done in (wrong, alone)] == [1, 1]
    for env in ({"GRADSAN_OPTIONS": "lang=en", "GRADSAN": "0"}, {"GRADSAN": "off"}, {}):
        assert run_python("-c", "import torch", env=env).stderr == ""
    assert run_python("-c", "import gradsan", env={"GRADSAN_OPTIONS": "lang=en"}).stderr == ""


def test_nothing_is_imported_where_nothing_asks(run_python: Runner) -> None:
    code = "import sys; print([name for name in sys.modules if 'gradsan' in name])"
    assert run_python("-c", code).stdout == "[]\n"
    assert run_python("-c", code, env={"GRADSAN": "1"}).stdout == "['gradsan_start']\n"


def test_the_words_that_ask_are_modes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(gradsan_start.ASKED.values()) == {"", "watch", "deep", "heal", "nonfinite"}
    line = Path(gradsan_start.__file__).with_name("gradsan_start.pth").read_text(encoding="utf-8")
    assert line.startswith("import os; ")
    for name in ("GRADSAN", "GRADSAN_OPTIONS"):
        monkeypatch.delenv(name, raising=False)
    assert "gradsan" not in {*os.environ}
    exec(line, {"__import__": sys.exit})
