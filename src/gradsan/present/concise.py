"""Report as one line a finding, ``path:line:column: CODE sentence``, as linters write it."""

from __future__ import annotations

from pathlib import Path

from gradsan import text
from gradsan.model import Diagnosis, Message, Report
from gradsan.present._places import location, primary_label, working_directory

__all__ = ["render_concise"]


def render_concise(report: Report, *, language: str, cwd: Path | None = None) -> str:
    """Return one line for each finding, with a line break; "" where nothing was found.

    Files below ``cwd`` (default: the process's own) are relative to it. ``[*]`` marks what ``--fix`` mends.
    """
    cwd = working_directory(cwd)
    return "".join(f"{_line(diagnosis, language, cwd)}\n" for diagnosis in report.diagnoses)


def _line(diagnosis: Diagnosis, language: str, cwd: Path | None) -> str:
    label = primary_label(diagnosis)
    is_certain = any(fix.applicability == "automatic" for fix in diagnosis.fixes)
    values = {
        "place": "?" if label is None else location(label.frame, cwd),
        "code": diagnosis.code,
        "mark": Message("lint.fixable_mark") if is_certain else "",
        "sentence": diagnosis.title,
    }
    key = "lint.line_maybe" if diagnosis.confidence == "possible" else "lint.line"
    return text.say(Message(key, values), language)
