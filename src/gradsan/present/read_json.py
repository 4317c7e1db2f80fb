"""Reports read back from JSON. Sentences stay in their language."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from gradsan.model import (
    Applicability,
    Born,
    Confidence,
    Copies,
    Deviation,
    Diagnosis,
    Event,
    EventKind,
    Fix,
    Frame,
    Gradient,
    GradientStatus,
    Label,
    Message,
    NamedTensor,
    NonFiniteFacts,
    NonFiniteValue,
    Outcome,
    PathNode,
    PathNodeKind,
    Program,
    Report,
    ReportMode,
    Role,
    Seen,
    Severity,
    Site,
    Verification,
    Why,
)
from gradsan.present._fixes import old_lines
from gradsan.present.json import SCHEMA

_T = TypeVar("_T")


def each(read: Callable[[Any], _T], values: Iterable[Any]) -> tuple[_T, ...]:
    """Return every value converted by ``read``."""
    return tuple(read(value) for value in values)


def maybe(read: Callable[[Any], _T], value: Any) -> _T | None:
    """Return the value converted by ``read``, None if it is null."""
    return None if value is None else read(value)


def text(value: Any) -> str:
    """Return the value; raises TypeError if it is no text."""
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value


def whole(value: Any) -> int:
    """Return the value; raises TypeError if it is no integer."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{value!r} is no whole number")
    return value


def number(value: Any) -> float:
    """Return the value; raises TypeError if it is no number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{value!r} is no number")
    return value


def one_of(literal: Any, value: Any) -> Any:
    """Return the value; raises ValueError if it is no word of ``literal``."""
    if value not in get_args(literal):
        raise ValueError(f"{value!r} is none of {', '.join(get_args(literal))}")
    return value


_Meaning = Literal["preserved", "changed"]
_Tried = Literal["passed", "failed", "not_run"]
_Training = Literal["same", "gradients", "changed", "rejected"]


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
    diagnoses = tuple(_diagnosis(one) for one in data["diagnoses"])
    report = Report(
        program=_program(data["program"]),
        seen=_seen(data["seen"]),
        diagnoses=diagnoses,
        gradsan=text(data["gradsan"]),
        torch=maybe(text, data["torch"]),
        python=text(data["python"]),
        mode=one_of(ReportMode, data.get("mode", "watch")),
        next=each(text, data.get("next", ())),
    )
    return Recorded(report, _lines_of(data))


def _lines_of(data: Mapping[str, Any]) -> dict[tuple[str, int], str]:
    """Return all source lines that a report holds: at its labels, in its diffs, in its stacks."""
    lines: dict[tuple[str, int], str] = {}
    labels = [label for one in data["diagnoses"] for label in one["labels"]]
    for label in labels:
        for line in label.get("lines", ()):
            lines[text(label["file"]), whole(line["line"])] = text(line["text"])
    for fix in (fix for one in data["diagnoses"] for fix in one["fixes"]):
        lines = old_lines(text(fix["diff"])) | lines
    for label in labels:
        for frame in label["stack"]:
            if frame.get("text") is not None:
                lines.setdefault((text(frame["file"]), whole(frame["line"])), text(frame["text"]))
        if label["source"] is not None:
            lines.setdefault((text(label["file"]), whole(label["line"])), _indented(label))
    return lines


def _indented(label: Mapping[str, Any]) -> str:
    """Return the source line of an early report, with its lost indentation restored to fit its columns."""
    source, column, end = text(label["source"]), label["column"], label["end_column"]
    missing = (end or column or 1) - 1 - len(source)
    return " " * max(missing, 0) + source


def _program(data: Mapping[str, Any]) -> Program:
    exception = data["exception"]
    return Program(
        argv=tuple(map(text, data["argv"])),
        outcome=one_of(Outcome, data["outcome"]),
        exception=None if exception is None else (text(exception["type"]), text(exception["message"])),
        ended=bool(data.get("ended", True)),
        started=maybe(text, data.get("started")),
        seconds=maybe(number, data.get("seconds")),
    )


def _seen(data: Mapping[str, Any]) -> Seen:
    return Seen(
        saves=whole(data["saves"]),
        writes=whole(data["writes"]),
        backwards=whole(data["backwards"]),
        steps=whole(data["steps"]),
        blind_spots=each(_said, data["blind_spots"]),
        processes=whole(data.get("processes", 1)),
        copies=each(_copies, data.get("copies", ())),
    )


def _copies(data: Mapping[str, Any]) -> Copies:
    return Copies(text(data["device"]), whole(data["bytes"]), whole(data["left_out"]))


def _diagnosis(data: Mapping[str, Any]) -> Diagnosis:
    why, gradient = data["why"], data["gradient"]
    return Diagnosis(
        code=text(data["code"]),
        cause=text(data["cause"]),
        severity=one_of(Severity, data["severity"]),
        silent=bool(data["silent"]),
        title=_said(data["title"]),
        explanation=_said(data["explanation"]),
        labels=each(_label, data["labels"]),
        tensor=maybe(_tensor, data["tensor"]),
        why=None if why is None else Why(maybe(text, why["formula"]), _said(why["text"])),
        gradient=Gradient(
            one_of(GradientStatus, gradient["status"]),
            maybe(float, gradient["relative_error"]),
            maybe(_if_meant, gradient.get("if_meant")),
        ),
        fixes=each(_fix, data["fixes"]),
        notes=each(_said, data["notes"]),
        count=whole(data["count"]),
        events=each(_event, data.get("events", ())),
        events_left_out=whole(data.get("events_left_out", 0)),
        way=each(_path_node, data.get("way", ())),
        sources=each(text, data.get("sources", ())),
        confidence=one_of(Confidence, data.get("confidence", "recorded")),
        nonfinite=maybe(_nonfinite, data.get("nonfinite")),
    )


def _if_meant(data: Mapping[str, Any]) -> Deviation:
    return Deviation(tuple((text(one["name"]), float(one["relative_error"])) for one in data["gradients"]))


def _nonfinite(data: Mapping[str, Any]) -> NonFiniteFacts:
    bounds = data["input_range"]
    return NonFiniteFacts(
        born=one_of(Born, data["born"]),
        op=text(data["op"]),
        value=one_of(NonFiniteValue, data["value"]),
        round=whole(data["round"]),
        elements=whole(data["elements"]),
        of=whole(data["of"]),
        input_range=None if bounds is None else (float(bounds[0]), float(bounds[1])),
        why=_said(data["why"]),
        losses=each(float, data["losses"]),
    )


def _tensor(data: Mapping[str, Any]) -> NamedTensor:
    return NamedTensor(
        name=maybe(text, data["name"]),
        shape=each(whole, data["shape"]),
        dtype=text(data["dtype"]),
        device=text(data["device"]),
        op=maybe(text, data["op"]),
        operand=maybe(text, data["operand"]),
        transposed=bool(data.get("transposed", False)),
    )


def _label(data: Mapping[str, Any]) -> Label:
    column, end_line, end_column = (maybe(whole, data[name]) for name in ("column", "end_line", "end_column"))
    file, line, function = text(data["file"]), whole(data["line"]), text(data["function"])
    frame = Frame(file, line, function, column, end_line, end_column, is_user=True)
    stack = each(_frame, data["stack"])
    return Label(
        role=one_of(Role, data["role"]),
        frame=frame,
        message=_said(data["message"]),
        op=maybe(text, data["op"]),
        site=Site(stack),
    )


def _frame(data: Mapping[str, Any]) -> Frame:
    file = text(data["file"])
    # Early reports do not mark user code: files below the working directory were the user's.
    is_user = bool(data.get("user", not Path(file).is_absolute()))
    return Frame(file, whole(data["line"]), text(data["function"]), maybe(whole, data.get("column")), is_user=is_user)


def _event(data: Mapping[str, Any]) -> Event:
    file, line = maybe(text, data["file"]), maybe(whole, data["line"])
    return Event(
        kind=one_of(EventKind, data["kind"]),
        clock=whole(data["clock"]),
        step=whole(data["step"]),
        op=maybe(text, data["op"]),
        version=maybe(whole, data["version"]),
        frame=None if file is None or line is None else Frame(file, line, "", is_user=True),
        touches=bool(data.get("touches", True)),
    )


def _path_node(data: Mapping[str, Any]) -> PathNode:
    file, line = maybe(text, data.get("file")), maybe(whole, data.get("line"))
    return PathNode(
        kind=one_of(PathNodeKind, data["kind"]),
        name=maybe(text, data["name"]),
        step=maybe(whole, data["step"]),
        count=whole(data.get("count", 1)),
        frame=None if file is None or line is None else Frame(file, line, "", is_user=True),
        nodes=whole(data.get("nodes", 0 if data["kind"] == "gap" else 1)),
    )


def _fix(data: Mapping[str, Any]) -> Fix:
    tried = data["verification"]
    return Fix(
        kind=text(data["kind"]),
        meaning=one_of(_Meaning, data["meaning"]),
        summary=_said(data["summary"]),
        how_changed=maybe(_said, data["how_changed"]),
        applicability=one_of(Applicability, data["applicability"]),
        lines=tuple((text(one["file"]), whole(one["line"]), text(one["text"])) for one in data.get("lines", ())),
        diff=text(data["diff"]),
        verification=Verification(
            status=one_of(_Tried, tried["status"]),
            detail=text(tried["detail"]),
            gradient_difference=maybe(float, tried["gradient_difference"]),
            time_ratio=maybe(float, tried["time_ratio"]),
            memory_ratio=maybe(float, tried["memory_ratio"]),
            training=maybe(partial(one_of, _Training), tried.get("training")),
            differs_in=tuple(map(text, tried.get("differs_in", ()))),
        ),
    )


def _said(words: Any) -> Message:
    return plain(text(words))
