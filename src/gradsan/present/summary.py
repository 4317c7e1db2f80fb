"""Report as one line of JSON: what a program that started another one decides by."""

from __future__ import annotations

import json
from pathlib import Path

from gradsan import text
from gradsan.model import Diagnosis, Report
from gradsan.present._places import primary_label, shown_path, working_directory

SCHEMA = "gradsan.summary/1"


def render_summary(report: Report, *, language: str, cwd: Path | None = None) -> str:
    """Return the counts, each finding with its place, and the commands that lead on, as one line of JSON."""
    folder = working_directory(cwd)
    seen = report.seen
    severities = [one.severity for one in report.diagnoses]
    summary = {
        "schema": SCHEMA,
        "outcome": report.program.outcome,
        "errors": severities.count("error"),
        "warnings": severities.count("warning"),
        "notes": severities.count("note"),
        "seen": {"saves": seen.saves, "writes": seen.writes, "backwards": seen.backwards, "steps": seen.steps},
        "findings": [_finding(one, language, folder) for one in report.diagnoses],
        "next": list(report.next),
    }
    return json.dumps(summary, ensure_ascii=True, separators=(",", ":")) + "\n"


def _finding(diagnosis: Diagnosis, language: str, cwd: Path | None) -> dict[str, object]:
    label = primary_label(diagnosis)
    return {
        "code": diagnosis.code,
        "severity": diagnosis.severity,
        "title": text.say(diagnosis.title, language),
        "count": diagnosis.count,
        "silent": diagnosis.silent,
        "file": None if label is None else shown_path(label.frame.file, cwd),
        "line": None if label is None else label.frame.line,
    }
