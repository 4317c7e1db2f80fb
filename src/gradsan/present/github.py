"""Report as annotations of GitHub Actions: workflow commands, one per line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from gradsan import text
from gradsan.model import Diagnosis, Label, Message, Report, Severity
from gradsan.present._places import primary_label, shown_path, working_directory

_COMMAND: dict[Severity, str] = {"error": "error", "warning": "warning", "note": "notice"}
_NEEDED = ("saved", "written", "bridge", "created", "freed")
_NOTICES_A_STEP = 10
"""The most annotations of one kind that GitHub shows in one step of a job."""


def render_github(report: Report, *, language: str, cwd: Path | None = None) -> str:
    """Return workflow commands, each with a line break; "" if nothing was found.

    A diagnosis is an ``error``, a ``warning`` or a ``notice`` where the value was needed; the save, the first
    write and the bridge are notices, ten in all at most. Files below ``cwd`` (default: the
    process's own) are relative to it, as GitHub requires.
    """
    cwd = working_directory(cwd)
    notices = 0
    rows: list[str] = []
    for diagnosis in report.diagnoses:
        rows.append(_finding(diagnosis, language, cwd))
        for label in _places_needed(diagnosis):
            if notices < _NOTICES_A_STEP:
                notices += 1
                title = f"gradsan {diagnosis.code}"
                rows.append(_command("notice", label, title, _say(label.message, language), cwd))
    return "".join(f"{row}\n" for row in rows)


def _finding(diagnosis: Diagnosis, language: str, cwd: Path | None) -> str:
    title = f"gradsan {diagnosis.code}: {_say(diagnosis.title, language)}"
    body = [_say(diagnosis.explanation, language)]
    body += [f"{_say(Message('ui.help'), language)}: {_say(fix.summary, language)}" for fix in diagnosis.fixes]
    body += [_say(note, language) for note in diagnosis.notes]
    return _command(_COMMAND[diagnosis.severity], primary_label(diagnosis), title, "\n".join(body), cwd)


def _places_needed(diagnosis: Diagnosis) -> Iterator[Label]:
    """Yield the first label of each needed role, if it is not on the line of the finding itself."""
    primary = primary_label(diagnosis)
    taken = {(primary.frame.file, primary.frame.line)} if primary else set()
    for role in _NEEDED:
        label = next((one for one in diagnosis.labels if one.role == role), None)
        if label is not None and (label.frame.file, label.frame.line) not in taken:
            taken.add((label.frame.file, label.frame.line))
            yield label


def _command(name: str, label: Label | None, title: str, message: str, cwd: Path | None) -> str:
    properties: dict[str, str | int] = {}
    if label is not None:
        frame = label.frame
        end_line = max(frame.end_line or frame.line, frame.line)
        properties = {"file": shown_path(frame.file, cwd), "line": frame.line, "endLine": end_line}
        # GitHub accepts columns only for a place within one line.
        if end_line == frame.line and frame.column is not None and frame.column >= 1:
            properties["col"] = frame.column
            if frame.end_column is not None and frame.end_column > frame.column:
                properties["endColumn"] = frame.end_column
    properties["title"] = title
    said = ",".join(f"{key}={_escape_property(str(value))}" for key, value in properties.items())
    return f"::{name} {said}::{_escape(message)}"


def _escape(words: str) -> str:
    words = words.encode("utf-8", "backslashreplace").decode("utf-8")
    return words.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _escape_property(words: str) -> str:
    return _escape(words).replace(":", "%3A").replace(",", "%2C")


def _say(message: Message, language: str) -> str:
    return text.say(message, language)
