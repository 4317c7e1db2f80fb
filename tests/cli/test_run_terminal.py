"""Terminal output of ``gradsan run``: a line after a clean run, a rule between traceback and report."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cases import each
from forked import warm_python

pty = pytest.importorskip("pty", reason="a terminal of its own")

CLEAN = "import torch\nw = torch.ones(3, requires_grad=True)\n(w * w).sum().backward()\nprint(w.grad.sum().item())\n"
BROKEN = "import torch\nw = torch.ones(3, requires_grad=True)\nh = w.exp()\nh += 1\nh.sum().backward()\n"


def on_a_terminal(folder: Path, *words: str, python: str = sys.executable) -> str:
    """What ``gradsan run`` writes to a stderr that is a terminal of 80 columns."""
    ours, theirs = pty.openpty()
    env = {
        **os.environ,
        "COLUMNS": "80",
        "LC_ALL": "C.UTF-8",
        "NO_COLOR": "1",
        "PYTHONUTF8": "1",
        "OMP_NUM_THREADS": "1",
    }
    command = [python, "-m", "gradsan", "run", *words, "main.py"]
    child = subprocess.Popen(command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=theirs)
    os.close(theirs)
    said = b""
    try:
        while part := os.read(ours, 65536):
            said += part
    except OSError:  # Linux: the other side was closed
        pass
    os.close(ours)
    child.communicate(timeout=60)
    return said.decode().replace("\r\n", "\n")


@each(
    ("words", "said"),
    [
        ((), "gradsan: nothing found (2 saves, 0 writes, 1 backward)\n"),
        (("--lang", "zh"), "gradsan: 没有发现问题（2 次保存，0 次写入，1 次反向传播）\n"),
        (("--quiet",), ""),
    ],
)
def test_a_clean_run_ends_with_one_line(tmp_path, words, said):
    (tmp_path / "main.py").write_text(CLEAN, encoding="utf-8")
    assert on_a_terminal(tmp_path, *words, python=warm_python()[0]) == said


def test_a_rule_stands_between_the_traceback_and_the_report(tmp_path):
    (tmp_path / "main.py").write_text(BROKEN, encoding="utf-8")
    said = on_a_terminal(tmp_path)
    traceback, rule, report = re.split(r"(?m)^(-{79})$", said)
    assert traceback.rstrip().rpartition("\n")[2].startswith("RuntimeError: one of the variables")
    assert rule
    assert report.strip().startswith("error[GS101]")
    assert "nothing found" not in report
