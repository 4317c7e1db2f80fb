"""A report from its JSON: what ``render_json`` wrote, back as a Report. Sentences stay in the language they are in."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from gradsan.model import (
    Applicability,
    Diagnosis,
    Event,
    EventKind,
    Fix,
    Frame,
    Gradient,
    GradientStatus,
    Knot,
    KnotKind,
    Label,
    Message,
    NamedTensor,
    Outcome,
    Program,
    Report,
    Role,
    Seen,
    Severity,
    Site,
    Verification,
    Why,
)
from gradsan.present._replace import old_lines
from gradsan.present.json import SCHEMA

_T = TypeVar("_T")
_Meaning = Literal["preserved", "changed"]
_Tried = Literal["passed", "failed", "not_run"]


class ReadError(Exception):
    """A file is no report that can be read; ``message`` is the sentence that says why."""

    def __init__(self, message: Message) -> None:
        """``message`` names the file."""
        super().__init__(message.key)
        self.message = message


@dataclass(frozen=True, slots=True)
class Recorded:
    """A report from a file. ``lines`` are the source lines it holds, by (file, line), as they were then."""

    report: Report
    lines: Mapping[tuple[str, int], str]


def plain(words: str) -> Message:
    """A Message whose words are there already, in whatever language they are."""
    return Message("report.plain", {"text": words})


def read_report(path: Path) -> Recorded:
    """The report in the file ``path``, as ``gradsan run --json`` writes it.

    Raises:
        ReadError: where the file cannot be read, is no JSON, or is no report of a version that is known.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as failure:
        reason = (isinstance(failure, OSError) and failure.strerror) or str(failure)
        raise ReadError(Message("report.unreadable", {"path": path, "reason": reason})) from None
    try:
        data = json.loads(text)
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
        told = f"{type(failure).__name__}: {failure}"
        raise ReadError(Message("report.broken", {"path": path, "reason": told})) from None


def from_dict(data: Mapping[str, Any]) -> Recorded:
    """What :func:`gradsan.present.json.as_dict` returned, back as a report.

    Fields that are not known are passed over; fields that were added to the contract later may be missing.

    Raises:
        KeyError, TypeError, ValueError, AttributeError: where the contract is broken.
    """
    diagnoses = tuple(_diagnosis(one) for one in data["diagnoses"])
    report = Report(
        program=_program(data["program"]),
        seen=_seen(data["seen"]),
        diagnoses=diagnoses,
        gradsan=_text(data["gradsan"]),
        torch=_maybe(_text, data["torch"]),
        python=_text(data["python"]),
    )
    return Recorded(report, _lines_of(data))


def _lines_of(data: Mapping[str, Any]) -> dict[tuple[str, int], str]:
    """All source lines that a report holds: at its labels, in its diffs, in its stacks."""
    lines: dict[tuple[str, int], str] = {}
    labels = [label for one in data["diagnoses"] for label in one["labels"]]
    for label in labels:
        for line in label.get("lines", ()):
            lines[_text(label["file"]), _int(line["line"])] = _text(line["text"])
    for fix in (fix for one in data["diagnoses"] for fix in one["fixes"]):
        lines = old_lines(_text(fix["diff"])) | lines
    for label in labels:
        for frame in label["stack"]:
            if frame.get("text") is not None:
                lines.setdefault((_text(frame["file"]), _int(frame["line"])), _text(frame["text"]))
        if label["source"] is not None:
            lines.setdefault((_text(label["file"]), _int(label["line"])), _indented(label))
    return lines


def _indented(label: Mapping[str, Any]) -> str:
    """The source line of an early report, which had lost its indentation: its columns must fit it again."""
    source, column, end = _text(label["source"]), label["column"], label["end_column"]
    missing = (end or column or 1) - 1 - len(source)
    return " " * max(missing, 0) + source


def _program(data: Mapping[str, Any]) -> Program:
    exception = data["exception"]
    return Program(
        argv=tuple(map(_text, data["argv"])),
        outcome=_one_of(Outcome, data["outcome"]),
        exception=None if exception is None else (_text(exception["type"]), _text(exception["message"])),
    )


def _seen(data: Mapping[str, Any]) -> Seen:
    return Seen(
        saves=_int(data["saves"]),
        writes=_int(data["writes"]),
        backwards=_int(data["backwards"]),
        steps=_int(data["steps"]),
        blind_spots=_each(_said, data["blind_spots"]),
    )


def _diagnosis(data: Mapping[str, Any]) -> Diagnosis:
    why, gradient = data["why"], data["gradient"]
    return Diagnosis(
        code=_text(data["code"]),
        cause=_text(data["cause"]),
        severity=_one_of(Severity, data["severity"]),
        silent=bool(data["silent"]),
        title=_said(data["title"]),
        explanation=_said(data["explanation"]),
        labels=_each(_label, data["labels"]),
        tensor=_maybe(_tensor, data["tensor"]),
        why=None if why is None else Why(_maybe(_text, why["formula"]), _said(why["text"])),
        gradient=Gradient(_one_of(GradientStatus, gradient["status"]), _maybe(float, gradient["relative_error"])),
        fixes=_each(_fix, data["fixes"]),
        notes=_each(_said, data["notes"]),
        count=_int(data["count"]),
        events=_each(_event, data.get("events", ())),
        way=_each(_knot, data.get("way", ())),
        sources=_each(_text, data.get("sources", ())),
    )


def _tensor(data: Mapping[str, Any]) -> NamedTensor:
    return NamedTensor(
        name=_maybe(_text, data["name"]),
        shape=_each(_int, data["shape"]),
        dtype=_text(data["dtype"]),
        device=_text(data["device"]),
        op=_maybe(_text, data["op"]),
        operand=_maybe(_text, data["operand"]),
    )


def _label(data: Mapping[str, Any]) -> Label:
    column, end_line, end_column = (_maybe(_int, data[name]) for name in ("column", "end_line", "end_column"))
    file, line, function = _text(data["file"]), _int(data["line"]), _text(data["function"])
    frame = Frame(file, line, function, column, end_line, end_column, is_user=True)
    stack = _each(_frame, data["stack"])
    return Label(
        role=_one_of(Role, data["role"]),
        frame=frame,
        message=_said(data["message"]),
        op=_maybe(_text, data["op"]),
        site=Site(stack),
    )


def _frame(data: Mapping[str, Any]) -> Frame:
    file = _text(data["file"])
    # Early reports do not say whose code it is: what lay below the working directory was the user's.
    is_user = bool(data.get("user", not Path(file).is_absolute()))
    return Frame(file, _int(data["line"]), _text(data["function"]), _maybe(_int, data.get("column")), is_user=is_user)


def _event(data: Mapping[str, Any]) -> Event:
    file, line = _maybe(_text, data["file"]), _maybe(_int, data["line"])
    return Event(
        kind=_one_of(EventKind, data["kind"]),
        clock=_int(data["clock"]),
        step=_int(data["step"]),
        op=_maybe(_text, data["op"]),
        version=_maybe(_int, data["version"]),
        frame=None if file is None or line is None else Frame(file, line, "", is_user=True),
        touches=bool(data.get("touches", True)),
    )


def _knot(data: Mapping[str, Any]) -> Knot:
    return Knot(_one_of(KnotKind, data["kind"]), _maybe(_text, data["name"]), _maybe(_int, data["step"]))


def _fix(data: Mapping[str, Any]) -> Fix:
    tried = data["verification"]
    return Fix(
        kind=_text(data["kind"]),
        meaning=_one_of(_Meaning, data["meaning"]),
        summary=_said(data["summary"]),
        how_changed=_maybe(_said, data["how_changed"]),
        applicability=_one_of(Applicability, data["applicability"]),
        lines=tuple((_text(one["file"]), _int(one["line"]), _text(one["text"])) for one in data.get("lines", ())),
        diff=_text(data["diff"]),
        verification=Verification(
            status=_one_of(_Tried, tried["status"]),
            detail=_text(tried["detail"]),
            gradient_difference=_maybe(float, tried["gradient_difference"]),
            time_ratio=_maybe(float, tried["time_ratio"]),
            memory_ratio=_maybe(float, tried["memory_ratio"]),
        ),
    )


def _said(words: Any) -> Message:
    return plain(_text(words))


def _each(read: Callable[[Any], _T], values: Iterable[Any]) -> tuple[_T, ...]:
    return tuple(read(value) for value in values)


def _maybe(read: Callable[[Any], _T], value: Any) -> _T | None:
    return None if value is None else read(value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value


def _int(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{value!r} is no whole number")
    return value


def _one_of(literal: Any, value: Any) -> Any:
    if value not in get_args(literal):
        raise ValueError(f"{value!r} is none of {', '.join(get_args(literal))}")
    return value
