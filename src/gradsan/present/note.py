"""Short forms of a report: an exception note, one line of JSON, and one line per finding in the style of linters."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from gradsan import text
from gradsan.model import Diagnosis, Message, Report
from gradsan.present._canvas import word
from gradsan.present._cells import clean
from gradsan.present._places import location, primary_label, shown_path, working_directory
from gradsan.source.tree import source_line


def short_note(diagnosis: Diagnosis, language: str) -> str:
    """Return two to five lines without colour: the title, the places of save, write and use, the first help.

    Files are shown relative to the working directory. Of several places of one kind the first is shown, with the
    number of the others.
    """
    colon = word(language, "colon")
    severity = word(language, f"severity.{diagnosis.severity}")
    lines = [f"gradsan{colon}{severity}[{diagnosis.code}]{colon}{_say(diagnosis.title, language)}"]
    for role in ("saved", "written", "used", "origin", "noticed"):
        places = _places(diagnosis, role)
        if places:
            shown = places[0]
            if len(places) > 1:
                shown = word(language, "and_others", place=shown, count=len(places) - 1)
            lines.append(f"  {word(language, f'role.{role}')}{colon}{shown}")
    if diagnosis.fixes:
        lines.append(f"  {word(language, 'help')}{colon}{_say(diagnosis.fixes[0].summary, language)}")
    if len(lines) == 1:
        lines.append(f"  {_say(diagnosis.explanation, language)}")
    return "\n".join(lines)


def unseen_note(blind_spots: Sequence[Message], language: str) -> str:
    """Return the sentence that an error was not explained, and a line for each blind spot."""
    lines = [f"gradsan{word(language, 'colon')}{word(language, 'unexplained')}"]
    return "\n".join([*lines, *(f"  - {_say(spot, language)}" for spot in blind_spots)])


def _say(message: Message, language: str) -> str:
    return clean(text.say(message, language))


def _places(diagnosis: Diagnosis, role: str) -> list[str]:
    cwd = working_directory(None)
    places: list[str] = []
    for label in diagnosis.labels:
        if label.role == role:
            place = f"{shown_path(label.frame.file, cwd)}:{label.frame.line}"
            source = (source_line(label.frame.file, label.frame.line) or "").strip()
            places.append(clean(f"{place}  {source}") if source else place)
    return places


SCHEMA = "gradsan.summary/1"


def render_summary(report: Report, *, language: str, cwd: Path | None = None) -> str:
    """Return the counts, each finding with its place, and the commands to run next, as one line of JSON."""
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


def render_concise(report: Report, *, language: str, cwd: Path | None = None) -> str:
    """Return one line for each finding, with a line break; "" if nothing was found.

    Files below ``cwd`` (default: the process's own) are relative to it. ``[*]`` marks findings that ``--fix`` can fix.
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
