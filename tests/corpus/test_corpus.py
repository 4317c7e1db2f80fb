"""Programs through the real command line: the right lines, the right name, and silence where nothing is wrong.

One folder a case: ``main.py`` (and helper modules) and ``expected.json`` with the answers. A new folder is a new test.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from forked import run_forked

# Named by the part of its line that made it, of which Python 3.10 knows nothing.
NAMED_BY_COLUMNS = {"inplace_module__set_all_inplace_loop"}
CASES = sorted(path.parent for path in Path(__file__).parent.glob("cases/*/expected.json"))


def watched(case: Path, folder: Path) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    shutil.copytree(case, folder / "case", ignore=shutil.ignore_patterns("expected.json"))
    words = ["-m", "gradsan", "run", "--json", str(folder / "report.json"), "main.py"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    done = run_forked(words, cwd=folder / "case", env=environment)
    return done, json.loads((folder / "report.json").read_text())


def places(answer: Any) -> set[tuple[str, int]]:
    if answer is None:
        return set()
    return {(place["file"], place["line"]) for place in (answer if isinstance(answer, list) else [answer])}


def labelled(diagnosis: dict[str, Any], role: str) -> set[tuple[str, int]]:
    return {(label["file"], label["line"]) for label in diagnosis["labels"] if label["role"] == role}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_case(case: Path, tmp_path: Path) -> None:
    answer = json.loads((case / "expected.json").read_text())
    done, report = watched(case, tmp_path)
    errors = [found for found in report["diagnoses"] if found["severity"] in ("error", "warning")]
    if answer["kind"] == "clean":
        assert done.returncode == 0, done.stderr
        assert errors == []
        return
    assert answer["error_contains"] in done.stderr
    (diagnosis,) = errors
    wrong = places(answer["mutated_at"]) | places(answer.get("other_bug_lines"))
    assert labelled(diagnosis, "written") & places(answer["mutated_at"])
    assert labelled(diagnosis, "written") <= wrong
    assert labelled(diagnosis, "saved") & places(answer["saved_at"])
    assert labelled(diagnosis, "used") & places(answer["backward_at"])
    if case.name not in NAMED_BY_COLUMNS or sys.version_info >= (3, 11):
        assert diagnosis["tensor"]["name"], "the tensor has a name"
