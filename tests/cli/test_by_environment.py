"""``GRADSAN=1`` before a command: the findings are those of ``gradsan run``, whatever starts the program."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from side_by_side import Runner

import gradsan_start

PROGRAM = """\
import torch

def silent():
    weight = torch.ones(3, requires_grad=True)
    curve = torch.exp(weight)
    curve.data.add_(1)
    curve.sum().backward()

def broken():
    weight = torch.ones(3, requires_grad=True)
    curve = torch.exp(weight)
    curve += 1
    curve.sum().backward()

if __name__ == "__main__":
    silent()
    broken()
"""
IN_A_TEST = "import main\n\ndef test_it():\n    main.silent()\n    main.broken()\n"
IN_A_NOTEBOOK = """
import nbformat
from nbclient import NotebookClient
cells = [nbformat.v4.new_code_cell(cell) for cell in ("import main\\nmain.silent()", "main.broken()")]
notebook = nbformat.v4.new_notebook(cells=cells)
NotebookClient(notebook, allow_errors=True, timeout=100).execute()
print("".join(notebook.cells[1].outputs[0].traceback))
raise SystemExit(1)
"""
STARTERS = {
    "python": ("main.py",),
    "pytest": ("-m", "pytest", "-q", "-p", "no:cacheprovider", "test_it.py"),
    "torchrun": ("-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port=0", "main.py"),
    "notebook": ("notebook.py",),
}
"""What follows ``GRADSAN=1 python``, by name; each ends with status 1."""

RIGHT = "import torch\nw = torch.ones(3, requires_grad=True)\n(w * 2).sum().backward()\nprint(w.grad)\n"


def findings(file: Path) -> set[tuple[str, tuple[tuple[str, str, int], ...]]]:
    """Codes, and which lines play which roles."""
    diagnoses = json.loads(file.read_text(encoding="utf-8"))["diagnoses"]
    return {
        (one["code"], tuple((label["role"], Path(label["file"]).name, label["line"]) for label in one["labels"]))
        for one in diagnoses
    }


def environment(folder: Path, asked: str | None, out: str) -> dict[str, str]:
    options = {"GRADSAN_OPTIONS": f"json={out}:lang=en", "GRADSAN_TEXT": "strict", "TMPDIR": str(folder)}
    return options if asked is None else {**options, "GRADSAN": asked}


@pytest.mark.parametrize("starter", ["python", "pytest", "torchrun", pytest.param("notebook", marks=pytest.mark.long)])
def test_every_launcher_gives_the_findings_of_gradsan_run(
    starter: str, tmp_path: Path, run_python: Runner, run_warm: Runner
) -> None:
    if starter == "notebook":
        for name in ("nbclient", "nbformat", "ipykernel"):
            pytest.importorskip(name)
    for name, text in (("main.py", PROGRAM), ("test_it.py", IN_A_TEST), ("notebook.py", IN_A_NOTEBOOK)):
        (tmp_path / name).write_text(text, encoding="utf-8")
    run_warm("run", "main.py", env=environment(tmp_path, None, "run.json"))
    expected = findings(tmp_path / "run.json")
    assert {code for code, _ in expected} == {"GS101", "GS202"}
    done = run_python(*STARTERS[starter], env={**environment(tmp_path, "1", "out.json"), "HOME": str(tmp_path)})
    assert done.status == 1, done.stderr
    assert findings(tmp_path / "out.json") == expected
    if starter == "python":
        traceback, _, report = done.stderr.rpartition("RuntimeError: ")
        assert "/src/gradsan/" not in traceback
        assert [part for part in ("error[GS202]", "error[GS101]", "2 errors") if part not in report] == []
    elif starter == "torchrun":
        assert done.stderr.count("error[GS101]") == 1, "both ranks' finding is reported once"
    elif starter == "notebook":
        assert "error[GS101]" in done.stdout
        assert "main.py:12" in done.stdout


def test_a_right_program_is_the_same_but_for_a_line(tmp_path: Path, run_python: Runner) -> None:
    (tmp_path / "main.py").write_text(RIGHT, encoding="utf-8")
    plain = run_python("main.py", is_warm=True)
    asked = run_python("main.py", env={"GRADSAN": "1", "TMPDIR": str(tmp_path)})
    assert (asked.stdout, asked.status) == (plain.stdout, 0)
    assert asked.stderr.count("\n") <= 1
    assert not asked.stderr or asked.stderr.startswith("gradsan: nothing found")


def test_invalid_or_missing_settings_are_reported_once(tmp_path: Path, run_python: Runner) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").touch()  # what is said of the settings is said as soon as torch is imported
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
