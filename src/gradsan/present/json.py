"""Report for programs: the JSON contract ``gradsan.report/1``, described by ``report.schema.json``.

A dataclass of ``gradsan.model`` is an object with its fields, by name and in their order. ``_Writer`` has a method for
each class whose object differs. :func:`read_report` reads it back by the annotations; sentences stay in their
language. Fields that the contract lacked once may be missing: those with a default.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from gradsan import text
from gradsan.model import Deviation, Event, Fix, Frame, Label, Lines, Message, PathNode, Program, Report, Site
from gradsan.present._fixes import diff_of, old_lines
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


_T = TypeVar("_T")


class ReadError(Exception):
    """A file is no readable report; ``message`` is the sentence that explains why."""

    def __init__(self, message: Message) -> None:
        """Keep ``message``, which names the file."""
        super().__init__(message.key)
        self.message = message


@dataclass(frozen=True, slots=True)
class Recorded:
    """A report from a file. ``lines`` are the source lines it holds, by (file, line), of the time of the run."""

    report: Report
    lines: Mapping[tuple[str, int], str]


def plain(words: str) -> Message:
    """Return a Message with fixed words, in whatever language they are."""
    return Message("report.plain", {"text": words})


def read_report(path: Path) -> Recorded:
    """Read the report in the file ``path``, in the format of ``gradsan run --json``.

    Raises:
        ReadError: if the file cannot be read, is no JSON, or is no report of a known version.
    """
    try:
        content = path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as failure:
        reason = (isinstance(failure, OSError) and failure.strerror) or str(failure)
        raise ReadError(Message("report.unreadable", {"path": path, "reason": reason})) from None
    try:
        data = json.loads(content)
    except (ValueError, RecursionError) as failure:
        raise ReadError(Message("report.no_json", {"path": path, "reason": failure})) from None
    schema = data.get("schema") if isinstance(data, dict) else None
    if schema is None:
        raise ReadError(Message("report.no_report", {"path": path}))
    if schema != SCHEMA:
        raise ReadError(Message("report.other_schema", {"path": path, "found": schema, "known": SCHEMA}))
    try:
        return from_dict(data)
    except (KeyError, TypeError, ValueError, AttributeError) as failure:
        failure_said = f"{type(failure).__name__}: {failure}"
        raise ReadError(Message("report.broken", {"path": path, "reason": failure_said})) from None


def from_dict(data: Mapping[str, Any]) -> Recorded:
    """Convert the result of :func:`gradsan.present.json.as_dict` back to a report.

    Unknown fields are ignored; fields that were added to the contract later may be missing.

    Raises:
        KeyError, TypeError, ValueError, AttributeError: if the contract is broken.
    """
    return Recorded(_read(Report, data), _lines_of(data))


def _lines_of(data: Mapping[str, Any]) -> dict[tuple[str, int], str]:
    """Return all source lines that a report holds: at its labels, in its diffs, in its stacks."""
    lines: dict[tuple[str, int], str] = {}
    labels = [label for one in data["diagnoses"] for label in one["labels"]]
    for label in labels:
        for line in label.get("lines", ()):
            lines[_text(label["file"]), _whole(line["line"])] = _text(line["text"])
    for fix in (fix for one in data["diagnoses"] for fix in one["fixes"]):
        lines = old_lines(_text(fix["diff"])) | lines
    for label in labels:
        for frame in label["stack"]:
            if frame.get("text") is not None:
                lines.setdefault((_text(frame["file"]), _whole(frame["line"])), _text(frame["text"]))
        if label["source"] is not None:
            lines.setdefault((_text(label["file"]), _whole(label["line"])), _indented(label))
    return lines


def _indented(label: Mapping[str, Any]) -> str:
    """Return the source line of an early report, with its lost indentation restored to fit its columns."""
    source, column, end = _text(label["source"]), label["column"], label["end_column"]
    missing = (end or column or 1) - 1 - len(source)
    return " " * max(missing, 0) + source


def _value(kind: Any, value: Any) -> Any:
    """Return the JSON value ``value`` as one of the annotated type ``kind``."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return None if value is None else _value(arguments[0], value)
    if origin is Literal:
        if value not in arguments:
            raise ValueError(f"{value!r} is none of {', '.join(arguments)}")
        return value
    if origin is tuple:
        kinds = [arguments[0]] * len(value) if arguments[-1] is ... else arguments
        return tuple(_value(one, part) for one, part in zip(kinds, value, strict=True))
    read = _READERS.get(kind)
    return _read(kind, value) if read is None else read(value)


@cache
def _annotated_fields(kind: Any) -> list[tuple[Field[Any], Any]]:
    hints = get_type_hints(kind)
    return [(field, hints[field.name]) for field in fields(kind)]


def _read(kind: type[_T], data: Mapping[str, Any], /, **known: object) -> _T:
    """Return the object ``data`` as an instance of a dataclass; the fields ``known`` are not looked up in it."""
    for field, hint in _annotated_fields(cast("Any", kind)):
        is_needed = field.default is MISSING and field.default_factory is MISSING
        if field.name not in known and (is_needed or field.name in data):
            known[field.name] = _value(hint, data[field.name])
    return kind(**known)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{value!r} is no whole number")
    return value


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{value!r} is no number")
    return float(value)


def _program(data: Mapping[str, Any]) -> Program:
    exception = data["exception"]
    known = None if exception is None else (_text(exception["type"]), _text(exception["message"]))
    return _read(Program, data, exception=known)


def _deviation(data: Mapping[str, Any]) -> Deviation:
    return Deviation(tuple((_text(one["name"]), _number(one["relative_error"])) for one in data["gradients"]))


def _label(data: Mapping[str, Any]) -> Label:
    stack = tuple(_frame(one) for one in data["stack"])
    return _read(Label, data, frame=_read(Frame, data, is_user=True), site=Site(stack))


def _frame(data: Mapping[str, Any]) -> Frame:
    # Early reports do not mark user code: files below the working directory were the user's.
    return _read(Frame, data, is_user=bool(data.get("user", not Path(_text(data["file"])).is_absolute())))


def _line(data: Mapping[str, Any]) -> Frame | None:
    """Return the frame of an event or a part of a path; None where the line is not known."""
    if data.get("file") is None or data.get("line") is None:
        return None
    return Frame(_text(data["file"]), _whole(data["line"]), "", is_user=True)


def _path_node(data: Mapping[str, Any]) -> PathNode:
    return _read(PathNode, {"nodes": 0 if data["kind"] == "gap" else 1, **data}, frame=_line(data))


def _fix(data: Mapping[str, Any]) -> Fix:
    lines = tuple((_text(one["file"]), _whole(one["line"]), _text(one["text"])) for one in data.get("lines", ()))
    return _read(Fix, data, lines=lines)


_READERS: Mapping[type, Callable[[Any], object]] = {
    str: _text,
    int: _whole,
    float: _number,
    bool: bool,
    Message: lambda words: plain(_text(words)),
    Program: _program,
    Deviation: _deviation,
    Label: _label,
    Event: lambda data: _read(Event, data, frame=_line(data)),
    PathNode: _path_node,
    Fix: _fix,
}
"""Readers of what is no object with the fields of a dataclass."""
