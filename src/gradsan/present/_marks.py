"""Marks: the labels of a diagnosis numbered, worded and placed on characters of the source."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

from gradsan.model import Diagnosis, Frame, Label
from gradsan.present._canvas import ROLE_STYLE, SEVERITY_STYLE, Canvas
from gradsan.present._places import primary_label, shown_path
from gradsan.source.tree import source_line

_EVENTS = ("saved", "written", "used", "created", "freed", "origin", "path", "noticed")
_CALLERS_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Mark:
    """A label to be drawn.

    ``heading`` is its number (``1. ``) or letter, if any; ``name`` is what a stack is headed with (``1. saved``);
    ``callers`` says how the program came there (often empty).
    """

    label: Label
    span: Span | None
    name: str
    heading: str
    body: str
    callers: str
    style: str
    is_primary: bool

    @property
    def underline(self) -> str:
        """The character that marks the span: ``^`` for what the diagnosis is about."""
        return "^" if self.is_primary else "-"

    @property
    def spans_lines(self) -> bool:
        """Whether the span ends on a later line than it begins."""
        return self.span is not None and self.span.end_line > self.span.line


def marks_of(diagnosis: Diagnosis, canvas: Canvas) -> list[Mark]:
    """Return one mark per label, in the order of the labels.

    Events are numbered in their order. Suspects are lettered in theirs, where there are several.
    """
    primary = primary_label(diagnosis)
    suspects = sum(label.role == "suspect" for label in diagnosis.labels)
    shared = _shared_callers(diagnosis.labels)
    events = letters = 0
    marks: list[Mark] = []
    for label in diagnosis.labels:
        heading = ""
        if label.role in _EVENTS:
            events += 1
            heading = f"{events}. "
        elif label.role == "suspect" and suspects > 1:
            heading = f"{_letter(letters)}. "
            letters += 1
        is_primary = label is primary
        marks.append(
            Mark(
                label=label,
                span=span_of(label.frame),
                name=heading + canvas.word(f"role.{label.role}"),
                heading=heading,
                body=canvas.say_short(label.message),
                callers=_callers(label, shared, canvas),
                style=SEVERITY_STYLE[diagnosis.severity] if is_primary else ROLE_STYLE[label.role],
                is_primary=is_primary,
            )
        )
    return marks


def _letter(index: int) -> str:
    return chr(ord("a") + index) if index < 26 else f"z{index - 25}"


def _user_callers(label: Label) -> list[Frame]:
    """Return the user's frames outside of the label's own, outermost first."""
    users = [frame for frame in label.site.frames if frame.is_user]
    if users and (users[-1].file, users[-1].line) == (label.frame.file, label.frame.line):
        users.pop()
    return users


def _shared_callers(labels: tuple[Label, ...]) -> int:
    """Return how many outermost callers all labels have in common: they tell the reader nothing."""
    stacks = [_user_callers(label) for label in labels if label.site.frames]
    shared = 0
    for level in zip(*stacks, strict=False):
        if any((frame.file, frame.line) != (level[0].file, level[0].line) for frame in level):
            break
        shared += 1
    return shared


def _callers(label: Label, shared: int, canvas: Canvas) -> str:
    inner = [frame for frame, _ in groupby(reversed(_user_callers(label)[shared:]))]
    if not inner:
        return ""
    places = [f"{shown_path(frame.file, canvas.cwd)}:{frame.line}" for frame in inner[:_CALLERS_SHOWN]]
    if len(inner) > _CALLERS_SHOWN:
        places.append(canvas.glyphs.ellipsis)
    return canvas.word("called_at", places=f" {canvas.glyphs.called_from} ".join(places))


@dataclass(frozen=True, slots=True)
class Span:
    """Characters ``start`` (of ``line``) up to and without ``end`` (of ``end_line``), counted from 0."""

    line: int
    start: int
    end_line: int
    end: int


def span_of(frame: Frame) -> Span | None:
    """Return the span that a frame marks, or None where its line cannot be read or holds nothing.

    Without columns it is the line without the white space around it; columns beyond the line count as unknown. An end
    before the start, or on a line that cannot be read, becomes the end of the first line.
    """
    source = source_line(frame.file, frame.line)
    if source is None or not source.strip():
        return None
    first, last = len(source) - len(source.lstrip()), len(source.rstrip())
    if frame.column is None or not 1 <= frame.column <= last:
        return Span(frame.line, first, frame.line, last)
    start = frame.column - 1
    end_line = frame.end_line or frame.line
    if end_line > frame.line and frame.end_column is not None and frame.end_column > 1:
        end_source = source_line(frame.file, end_line)
        if end_source is not None and end_source.strip():
            return Span(frame.line, start, end_line, min(frame.end_column - 1, len(end_source.rstrip())))
        return Span(frame.line, start, frame.line, last)
    if frame.end_column is None:
        return Span(frame.line, start, frame.line, start + 1)
    end = min(frame.end_column - 1, last)
    return Span(frame.line, start, frame.line, end if end > start else last)
