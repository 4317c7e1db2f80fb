"""The five programs, fixed: `gradsan fix` measures what how-to/fix.md says of each candidate, in both languages."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from example_programs import EXAMPLES, NAMES, ROOT

pytestmark = pytest.mark.long

PAGES = (ROOT / "docs" / "how-to" / "fix.md", ROOT / "docs" / "how-to" / "fix.zh.md")
_ROW = re.compile(
    r"^\| (\w+) \| `(\w+)`[:：].*\| ([\d.]*) *\| (preserved|changed|rejected|保持不变|改变|淘汰)", re.MULTILINE
)
_MEANING = {"保持不变": "preserved", "改变": "changed", "淘汰": "rejected"}


def told(page: Path, example: str) -> list[tuple[str, str, str]]:
    """Kind, difference and meaning of each candidate of ``example`` in the tables of ``page``, in order."""
    rows = _ROW.findall(page.read_text(encoding="utf-8"))
    return [(kind, number, _MEANING.get(meaning, meaning)) for name, kind, number, meaning in rows if name == example]


def shown(fix: dict[str, object]) -> tuple[str, str, str]:
    verification = fix["verification"]
    assert isinstance(verification, dict)
    passed = verification["status"] == "passed"
    difference = f"{verification['gradient_difference']:.2g}" if passed else ""
    number = difference if "e" not in difference else f"{float(difference):.0f}"
    return str(fix["kind"]), number, str(fix["meaning"]) if passed else "rejected"


@pytest.mark.parametrize("example", NAMES)
def test_the_page_holds_the_measured_figures(example: str, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    program = EXAMPLES / example / "train.py"
    before = {file: file.read_bytes() for file in program.parent.glob("*.py")}
    done = subprocess.run(
        [sys.executable, "-m", "gradsan", "fix", "--steps", "4", "--json", str(report), str(program)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    diagnoses = json.loads(report.read_text(encoding="utf-8"))["diagnoses"]
    assert len(diagnoses) == 1
    tried = [shown(fix) for fix in diagnoses[0]["fixes"] if fix["verification"]["status"] != "not_run"]
    for page in PAGES:
        assert told(page, example) == tried, page.name
    assert {file: file.read_bytes() for file in before} == before
