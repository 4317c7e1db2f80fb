"""``gradsan lint`` as a command: lines, exit status, forms, comments, baseline, --fix, and results that are kept."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from gradsan.cli import main
from gradsan.lint import check
from gradsan.lint import running as cache_module
from gradsan.lint.running import Cache, lint_files

FAULTY = """\
import torch

w = torch.ones(3, requires_grad=True)
y = torch.exp(w)
y += 1
y.sum().backward()
"""
UNSURE = "import torch\nfrom torch import nn\n\n\ndef f(x):\n    y = torch.exp(x)\n    y += 1\n    return y\n"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("LC_ALL", "C.UTF-8")
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "train.py").write_text(FAULTY)
    return tmp_path


def test_lines_and_exit_status(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    assert main(["lint", "src"]) == 1
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("src/train.py:5:1: GS101 [*] `y` is the result of exp (line 4)")
    assert out[1:] == ["Found one fault in one file.", "[*] one of them is mended by `--fix`."]
    (folder / "src" / "train.py").write_text(FAULTY.replace("y += 1", "y = y + 1"))
    assert main(["lint", "src"]) == 0
    assert main(["lint", "nowhere"]) == 2
    assert main(["lint", "--jobs", "none", "src"]) == 2


def test_uncertain_findings_are_shown_on_request(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    (folder / "src" / "train.py").write_text(UNSURE)
    assert main(["lint", "src"]) == 0
    assert main(["lint", "--maybe", "src"]) == 1
    assert "src/train.py:7:5: GS101 (maybe) " in capsys.readouterr().out


def test_fix_writes_what_is_certain(folder: Path) -> None:
    assert main(["lint", "--fix", "src"]) == 0
    assert (folder / "src" / "train.py").read_text() == FAULTY.replace("y += 1", "y = y + 1")


def test_comments_rules_and_baseline(folder: Path) -> None:
    assert main(["lint", "--ignore", "GS1xx", "src"]) == 0
    assert main(["lint", "--write-baseline", "known.json", "src"]) == 1
    assert main(["lint", "--baseline", "known.json", "src"]) == 0
    (folder / "src" / "train.py").write_text(FAULTY.replace("y += 1", "y += 1  # gradsan: ignore[GS101]"))
    assert main(["lint", "src"]) == 0


def test_the_forms_for_programs(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    assert main(["lint", "--json", "src"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["schema"], report["mode"], report["torch"]) == ("gradsan.report/1", "lint", None)
    (found,) = report["diagnoses"]
    assert [(one["role"], one["line"]) for one in found["labels"]] == [("saved", 4), ("written", 5)]
    assert found["fixes"][0]["applicability"] == "automatic"
    assert "+y = y + 1" in found["fixes"][0]["diff"]
    assert main(["lint", "--sarif", "-o", "lint.sarif", "src"]) == 1
    (result,) = json.loads((folder / "lint.sarif").read_text())["runs"][0]["results"]
    assert result["locations"][0]["physicalLocation"]["region"]["startLine"] == 5
    assert main(["lint", "--github", "src"]) == 1
    assert "file=src/train.py,line=5" in capsys.readouterr().out
    assert main(["report", "--json", "lint.sarif"]) == 2


def test_results_are_kept_by_content(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = folder / "src" / "train.py"
    first = Cache(folder / "kept")
    before = dict(lint_files([file], first, 1))
    first.close()
    monkeypatch.setattr("gradsan.lint.running._check_file", lambda file, maybe: pytest.fail("read again"))
    assert dict(lint_files([file], Cache(folder / "kept"), 1)) == before
    monkeypatch.setattr(cache_module, "__version__", "another")
    with pytest.raises(pytest.fail.Exception):
        dict(lint_files([file], Cache(folder / "kept"), 1))


def test_several_processes_find_the_same(folder: Path) -> None:
    for number in range(5):
        (folder / "src" / f"more{number}.py").write_text(FAULTY + f"# {number}\n")
    files = sorted((folder / "src").glob("*.py"))
    command = f"""
from pathlib import Path
from gradsan.lint.running import Cache
from gradsan.lint.running import lint_files
if __name__ == "__main__":
    files = sorted(Path({str(folder / "src")!r}).glob("*.py"))
    print([len(checked.findings) for _, checked in lint_files(files, Cache(None), 2)])
"""
    (folder / "run_lint.py").write_text(command)
    done = subprocess.run([sys.executable, "run_lint.py"], capture_output=True, text=True)
    assert done.stdout.strip() == str([1] * len(files)), done.stderr


def test_files_that_cannot_be_parsed_are_left_out(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    main(["lint", "src"])
    before = capsys.readouterr().out
    (folder / "src" / "broken.py").write_text("import torch\nfrom torch import nn\nx += = 1\n")
    assert main(["lint", "src"]) == 1
    said = capsys.readouterr()
    assert "broken.py is left out: invalid syntax (line 3)" in said.err
    assert said.out == before


def test_a_file_without_torch_is_not_parsed() -> None:
    assert check(b"def broken(:\n    x += 1\n", "broken.py").problem is None
