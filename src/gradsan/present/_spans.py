"""Which characters of the source a label marks, whatever Python knew about columns."""

from __future__ import annotations

from dataclasses import dataclass

from gradsan.model import Frame
from gradsan.source.tree import source_line


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
