"""``gradsan run --halt`` and ``--strict``: where the program ends, what is shown, and with which status."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from side_by_side import Runner

SILENT = """\
import torch
x = torch.ones(3, requires_grad=True)
for turn in range(3):
    y = x.exp()
    y.data.mul_(2)
    print("turn", turn)
    y.sum().backward()
print("finished")
"""

COUNTED = SILENT.replace("y.data.mul_(2)", "y.detach().mul_(2)")

FALSE_ALARM = """\
import torch
base = torch.ones(4, requires_grad=True) * 1
loss = (base[:2] * base[:2]).sum()
with torch.no_grad():
    base[2:].mul_(5)
loss.backward()
print("finished")
"""


def test_the_program_ends_at_the_backward_and_the_report_is_shown(run_warm: Runner, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SILENT)
    ended = run_warm("run", "--halt", "--json", "report.json", "train.py")
    assert (ended.status, ended.stdout) == (66, "turn 0\n")
    assert '  File "train.py", line 7, in <module>' in ended.stderr.replace(f"{tmp_path}/", "")
    assert "gradsan.HaltError: " in ended.stderr
    assert "error[GS202]" in ended.stderr
    assert "src/gradsan/" not in ended.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["program"]["outcome"] == "failed"
    assert report["program"]["exception"]["type"] == "gradsan.HaltError"
    [found] = report["diagnoses"]
    assert [(label["role"], label["line"]) for label in found["labels"]] == [("saved", 4), ("written", 5), ("used", 7)]


def test_without_it_the_program_runs_on(run_warm: Runner, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SILENT)
    ended = run_warm("run", "train.py")
    assert (ended.status, ended.stdout) == (66, "turn 0\nturn 1\nturn 2\nfinished\n")


def test_an_error_of_pytorch_keeps_its_status(run_warm: Runner, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(COUNTED)
    ended = run_warm("run", "--halt", "train.py")
    assert ended.status == 1
    assert "modified by an inplace operation" in ended.stderr
    assert "HaltError" not in ended.stderr


@pytest.mark.parametrize(("code", "status"), [("7", 7), ("0", 1)])
def test_the_status(run_warm: Runner, tmp_path: Path, code: str, status: int) -> None:
    (tmp_path / "train.py").write_text(SILENT)
    assert run_warm("run", "--halt", "--exit-code", code, "train.py").status == status


@pytest.mark.parametrize(
    "words", [("--ignore", "GS202"), ("--suppressions", "known.txt"), ()], ids=["option", "file", "comment"]
)
def test_suppressed_findings_do_not_halt(run_warm: Runner, tmp_path: Path, words: tuple[str, ...]) -> None:
    mark = "" if words else "  # gradsan: ignore[GS202]"
    (tmp_path / "train.py").write_text(SILENT.replace("mul_(2)", f"mul_(2){mark}"))
    (tmp_path / "known.txt").write_text("GS202:train.py:5\n")
    ended = run_warm("run", "--halt", *words, "train.py")
    assert ended.status == 0
    assert ended.stdout.endswith("finished\n")


def test_a_known_finding_stops_nothing(run_warm: Runner, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SILENT)
    run_warm("run", "--write-baseline", "known.json", "train.py")
    assert run_warm("run", "--halt", "--baseline", "known.json", "train.py").status == 0


def test_other_places_to_say_it(run_warm: Runner, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SILENT)
    assert run_warm("run", "train.py", env={"GRADSAN_OPTIONS": "halt=1"}).stdout == "turn 0\n"
    (tmp_path / "pyproject.toml").write_text("[tool.gradsan]\nhalt = true\n")
    assert run_warm("run", "train.py").stdout == "turn 0\n"
    assert run_warm("run", "--no-halt", "train.py").stdout.endswith("finished\n")


def test_strictly_a_note_counts(run_warm: Runner, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(FALSE_ALARM)
    plain = run_warm("run", "--heal", "train.py")
    strict = run_warm("run", "--heal", "--strict", "train.py")
    halted = run_warm("run", "--heal", "--strict", "--halt", "train.py")
    assert (plain.status, plain.stdout) == (0, "finished\n")
    assert (strict.status, strict.stdout) == (66, "finished\n")
    assert (halted.status, halted.stdout) == (66, "")
    assert "note[GS120]" in plain.stderr
    assert "warning[GS120]" in strict.stderr
