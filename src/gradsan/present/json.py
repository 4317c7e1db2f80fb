"""Report for programs: the JSON contract ``gradsan.report/1``, described by ``report.schema.json``.

A dataclass of ``gradsan.model`` is an object with its fields, by name and in their order. ``_Writer`` has a method for
each class whose object differs. ``read_json.py`` reads it back by the same rule.
"""

from __future__ import annotations

import json
import math
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from gradsan import text
from gradsan.model import Deviation, Fix, Frame, Label, Lines, Message, Program, Report
from gradsan.present._fixes import diff_of
from gradsan.present._places import encodable, shown_path, shown_stack, working_directory
from gradsan.source.tree import source_line

SCHEMA = "gradsan.report/1"

_LINES_AROUND = 2
_MARKED_LINES_KEPT = 30


def render_json(report: Report, *, language: str, cwd: Path | None = None) -> str:
    """Return a report as JSON text, ending with a line break; equal reports give equal text.

    Files are relative to ``cwd`` (default: the process's own) if they lie below it. Lines and columns count from 1
    and ``end_column`` is exclusive; they are null if unknown, as is ``source`` if the line cannot be read.
    Numbers that are not finite are null.
    """
    return json.dumps(as_dict(report, language=language, cwd=cwd), ensure_ascii=False, allow_nan=False, indent=2) + "\n"


def as_dict(report: Report, *, language: str, cwd: Path | None = None) -> dict[str, Any]:
    """Return the content of :func:`render_json` as dictionaries, lists, strings and numbers."""
    return {"schema": SCHEMA, **_Writer(language, working_directory(cwd)).fields_of(report)}


class _Writer:
    """Values as JSON has them, in a language and with files relative to a folder."""

    def __init__(self, language: str, cwd: Path | None) -> None:
        self._language, self._cwd = language, cwd

    def value(self, value: object) -> Any:
        """Return any value of a report."""
        match value:
            case str():
                return encodable(value)
            case Message():
                return encodable(text.say(value, self._language))
            case float():
                return value if math.isfinite(value) else None
            case tuple():
                return [self.value(one) for one in value]
            case Program():
                return self.fields_of(value) | {"exception": self._exception(value)}
            case Deviation():
                return self._deviation(value)
            case Label():
                return self._label(value)
            case Fix():
                return self.fields_of(value) | {
                    "lines": self._lines(value.lines),
                    "diff": encodable(diff_of(value, self._cwd)),
                }
        return self.fields_of(value) if is_dataclass(value) else value

    def fields_of(self, value: Any) -> dict[str, Any]:
        """Return the fields of a dataclass; a frame, where it is one of them, as its file and line."""
        found: dict[str, Any] = {}
        for field in fields(value):
            one = getattr(value, field.name)
            if field.name == "frame":
                found["file"] = None if one is None else self._file(one.file)
                found["line"] = None if one is None else one.line
            else:
                found[field.name] = self.value(one)
        return found

    def _exception(self, program: Program) -> dict[str, Any] | None:
        if program.exception is None:
            return None
        kind, message = program.exception
        return {"type": kind, "message": encodable(message)}

    def _deviation(self, deviation: Deviation) -> dict[str, Any]:
        return {
            "relative_error": self.value(deviation.largest),
            "gradients": [
                {"name": encodable(name), "relative_error": self.value(error)} for name, error in deviation.errors
            ],
        }

    def _label(self, label: Label) -> dict[str, Any]:
        frame = label.frame
        source = source_line(frame.file, frame.line)
        return {
            "role": label.role,
            "file": self._file(frame.file),
            "line": frame.line,
            "column": frame.column,
            "end_line": frame.end_line,
            "end_column": frame.end_column,
            "function": frame.function,
            "source": None if source is None else encodable(source.strip()),
            "lines": [{"line": line, "text": encodable(words)} for line, words in _lines_around(frame)],
            "message": self.value(label.message),
            "op": label.op,
            "stack": [self._frame(frame) for frame in shown_stack(label.site)],
        }

    def _frame(self, frame: Frame) -> dict[str, Any]:
        source = source_line(frame.file, frame.line)
        return {
            "file": self._file(frame.file),
            "line": frame.line,
            "function": frame.function,
            "column": frame.column,
            "text": None if source is None else encodable(source),
            "user": frame.is_user,
        }

    def _lines(self, lines: Lines) -> list[dict[str, Any]]:
        return [{"file": self._file(file), "line": line, "text": encodable(new)} for file, line, new in lines]

    def _file(self, file: str) -> str:
        return encodable(shown_path(file, self._cwd))


def _lines_around(frame: Frame) -> list[tuple[int, str]]:
    """Return the marked lines and their neighbours, as (number, line), for readers without the files."""
    last = min(max(frame.end_line or frame.line, frame.line), frame.line + _MARKED_LINES_KEPT)
    numbers = range(max(frame.line - _LINES_AROUND, 1), last + _LINES_AROUND + 1)
    return [(number, line) for number in numbers if (line := source_line(frame.file, number)) is not None]
