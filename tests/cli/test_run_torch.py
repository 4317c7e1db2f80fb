"""``gradsan run`` with the real torch, the real session and the real presenters: the first started as people do."""

from __future__ import annotations

import json
from pathlib import Path

from side_by_side import Runner

OVERWRITTEN = """\
import torch
x = torch.ones(3, requires_grad=True)
y = x.sigmoid()
y += 1
y.sum().backward()
"""

LEAF = """\
import torch
x = torch.ones(3, requires_grad=True)
y = torch.ones(2)
try:
    y.add_(x)
except RuntimeError as first:
    try:
        x += 1
    except RuntimeError:
        torch.relu_(x)
"""

LATER = """\
import sys, types, torch
class Later(types.ModuleType):
    def __getattr__(self, name):
        print("asked for", name)
        raise ImportError("it needs a library that is not installed")
later = sys.modules["later"] = Later("later")
held = [later]
for _ in range(4):
    w = torch.ones(3, requires_grad=True)
    y = torch.exp(w)
    y.data.mul_(2)
    y.sum().backward()
"""

THREAD = """\
worker = threading.Thread(target=lambda: exec(source, {}), name="worker")
worker.start()
worker.join()
"""


def test_a_failing_program(tmp_path: Path, run_python: Runner, run_gradsan: Runner) -> None:
    (tmp_path / "main.py").write_text(OVERWRITTEN)
    plain = run_python(str(tmp_path / "main.py"), is_warm=True)
    watched = run_gradsan("run", "--json", "out.json", "main.py")
    assert (watched.stdout, watched.status) == (plain.stdout, 1)
    assert watched.stderr.startswith(plain.stderr)
    report = watched.stderr[len(plain.stderr) :]
    assert report.startswith("error[GS101]: ")
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["program"]["outcome"] == "failed"
    assert found["program"]["exception"]["type"] == "RuntimeError"
    assert [(label["role"], label["line"]) for label in found["diagnoses"][0]["labels"]] == [
        ("saved", 3),
        ("written", 4),
        ("used", 5),
    ]


def test_code_that_catches_the_error(run_warm: Runner) -> None:
    code = OVERWRITTEN.replace("y.sum()", "try: y.sum()") + "except RuntimeError: print('caught')\n"
    watched = run_warm("run", "-c", code, env={"GRADSAN_OPTIONS": "exit-code=9:lang=zh"})
    assert (watched.stdout, watched.status) == ("caught\n", 9)
    assert "错误[GS101]" in watched.stderr
    assert "y = y + 1" in watched.stderr


def test_a_thread_that_fails(tmp_path: Path, run_python: Runner, run_warm: Runner) -> None:
    (tmp_path / "main.py").write_text(f"import threading\nsource = {OVERWRITTEN!r}\n{THREAD}")
    plain, watched = run_python(str(tmp_path / "main.py"), is_warm=True), run_warm("run", "main.py")
    assert (plain.status, watched.status) == (0, 66)
    assert "in thread worker" in plain.stderr
    assert "modified by an inplace operation" in plain.stderr
    assert watched.stderr.startswith(plain.stderr)


def test_writes_that_fail_look_as_under_python(tmp_path: Path, run_python: Runner, run_warm: Runner) -> None:
    (tmp_path / "main.py").write_text(LEAF)
    plain, watched = run_python(str(tmp_path / "main.py"), is_warm=True), run_warm("run", "main.py")
    assert plain.stderr.count("RuntimeError: ") == 3
    assert (watched.status, watched.stdout) == (plain.status, plain.stdout)
    assert watched.stderr.startswith(plain.stderr)


def test_modules_that_import_when_asked_for_anything_are_not_asked(tmp_path: Path, run_warm: Runner) -> None:
    (tmp_path / "main.py").write_text(LATER)
    watched = run_warm("run", "main.py")
    assert (watched.status, watched.stdout) == (66, "")
    assert "error[GS202]" in watched.stderr


def test_a_report_that_cannot_be_made_leaves_the_program_its_status(run_warm: Runner) -> None:
    broken = "import sys, gradsan.launch.outcome as own\nown._with_lines = lambda report: 1 / 0\nprint('done')\n"
    watched = run_warm("run", "-c", OVERWRITTEN.replace("y += 1\n", "") + broken + "sys.exit(3)\n")
    assert (watched.status, watched.stdout) == (3, "done\n")
    assert "Traceback" not in watched.stderr
    assert "ZeroDivisionError" in watched.stderr
