"""Labels drawn onto their source lines, with the marks that number them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from rich.text import Text

from gradsan.model import Diagnosis, Frame, Label
from gradsan.present._canvas import FRAME_STYLE, QUIET_STYLE, ROLE_STYLE, SEVERITY_STYLE, Canvas
from gradsan.present._cells import DisplayLine, display, width_of, wrap
from gradsan.present._places import library_place, location, primary_label, shown_path
from gradsan.source.tree import source_line

_EVENTS = ("saved", "written", "used", "created", "freed", "origin", "path", "noticed")
_IN_LIBRARY = ("saved", "written", "created", "freed", "origin")
_CALLERS_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Mark:
    """A label to be drawn.

    ``heading`` is its number (``1. ``) or letter, if any; ``name`` is the heading of its stack (``1. saved``);
    ``around`` are lines that say from where, and where inside of a library (often none).
    """

    label: Label
    span: Span | None
    name: str
    heading: str
    body: str
    around: tuple[str, ...]
    style: str
    is_primary: bool

    @property
    def underline(self) -> str:
        """The character that underlines the span: ``^`` for the main label."""
        return "^" if self.is_primary else "-"

    @property
    def spans_lines(self) -> bool:
        """Whether the span ends on a later line than it begins."""
        return self.span is not None and self.span.end_line > self.span.line


def marks_of(diagnosis: Diagnosis, canvas: Canvas) -> list[Mark]:
    """Return one mark per label, in the order of the labels.

    Events are numbered in their order. Suspects are lettered in theirs, if there are several.
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
                around=_around(label, shared, canvas),
                style=SEVERITY_STYLE[diagnosis.severity] if is_primary else ROLE_STYLE[label.role],
                is_primary=is_primary,
            )
        )
    return marks


def _letter(index: int) -> str:
    return chr(ord("a") + index) if index < 26 else f"z{index - 25}"


def _user_callers(label: Label) -> list[Frame]:
    """Return the user's frames outside the label's own, outermost first."""
    users = [frame for frame in label.site.frames if frame.is_user]
    if users and (users[-1].file, users[-1].line) == (label.frame.file, label.frame.line):
        users.pop()
    return users


def _shared_callers(labels: tuple[Label, ...]) -> int:
    """Return the number of outermost callers shared by all labels: these are not informative."""
    stacks = [_user_callers(label) for label in labels if label.site.frames]
    shared = 0
    for level in zip(*stacks, strict=False):
        if any((frame.file, frame.line) != (level[0].file, level[0].line) for frame in level):
            break
        shared += 1
    return shared


def _around(label: Label, shared: int, canvas: Canvas) -> tuple[str, ...]:
    """Return the place inside of a library, and the callers, where there are any."""
    place = library_place(label.site) if label.role in _IN_LIBRARY and label.frame == label.site.user_frame else None
    inside = "" if place is None else canvas.word("in_library", place=place[0], function=place[1])
    return tuple(one for one in (inside, _callers(label, shared, canvas)) if one)


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
    """Characters from ``start`` (of ``line``) to ``end`` (of ``end_line``, exclusive), counted from 0."""

    line: int
    start: int
    end_line: int
    end: int


def span_of(frame: Frame) -> Span | None:
    """Return the span that a frame marks, or None if its line cannot be read or is empty.

    Without columns it is the line without surrounding white space; columns beyond the line count as unknown. An end
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


_ENOUGH_BESIDE = 36
"""The cells needed beside an underline for a message that must be wrapped."""

_ENOUGH_BELOW = 48
_LINES_SHOWN_AT_TOP = 3


def draw_marks(marks: Sequence[Mark], canvas: Canvas) -> Iterator[Text]:
    """Draw marks in their order, under one header for each run of marks in the same file."""
    for _, run in groupby(marks, key=lambda mark: mark.label.frame.file):
        group = list(run)
        head = next((mark for mark in group if mark.is_primary), group[0])
        arrow = (f"{canvas.glyphs.arrow} ", FRAME_STYLE)
        yield from canvas.paragraph(arrow, location(head.label.frame, canvas.cwd), indent=canvas.digits + 1)
        for _, together in groupby(enumerate(group), key=_line_key):
            yield from _draw_line([mark for _, mark in together], canvas)


def _line_key(numbered: tuple[int, Mark]) -> tuple[int, int]:
    index, mark = numbered
    return mark.label.frame.line, index if mark.spans_lines else -1


def _draw_line(marks: Sequence[Mark], canvas: Canvas) -> Iterator[Text]:
    frame = marks[0].label.frame
    source = source_line(frame.file, frame.line)
    if source is None:
        yield canvas.row(frame.line, (canvas.word("no_source"), QUIET_STYLE))
        for mark in marks:
            yield from _message_below(mark, 0, canvas)
    elif marks[0].spans_lines:
        yield from _draw_lines(marks[0], display(source.rstrip()), canvas)
    else:
        yield from _draw_one_line(marks, display(source.rstrip()), frame.line, canvas)


@dataclass(frozen=True, slots=True)
class _Window:
    """The visible part of a source line, in cells; ``before`` and ``after`` replace the cut-off parts."""

    left: int
    right: int
    before: str
    after: str

    def place(self, cell: int) -> int:
        """Return the drawn position of a cell of the source line; cut-off cells fall on the nearest visible one."""
        return width_of(self.before) + min(max(cell, self.left), self.right) - self.left

    def text(self, line: DisplayLine) -> str:
        return (self.before + line.cut(self.left, self.right) + self.after).rstrip()


def _window(line: DisplayLine, start: int, end: int, columns: int, ellipsis: str) -> _Window:
    """Choose the visible part of a line so that the cells from ``start`` to ``end`` are in it, as far as they fit."""
    if line.width <= columns:
        return _Window(0, line.width, "", "")
    edge = width_of(ellipsis)
    if end <= columns - edge:
        return _Window(0, columns - edge, "", ellipsis)
    shown = columns - 2 * edge
    left = start - max(0, (shown - (end - start)) // 2)
    if left + shown + edge >= line.width:
        return _Window(line.width - (columns - edge), line.width, ellipsis, "")
    return _Window(left, left + shown, ellipsis, ellipsis)


def _draw_one_line(marks: Sequence[Mark], line: DisplayLine, number: int, canvas: Canvas) -> Iterator[Text]:
    cells = [(line.offsets[mark.span.start], line.offsets[mark.span.end]) for mark in marks if mark.span is not None]
    if not cells:
        yield canvas.row(number)
        for mark in marks:
            yield from _message_below(mark, 0, canvas)
        return
    start, end = min(left for left, _ in cells), max(right for _, right in cells)
    if end - start > canvas.columns - 2 * width_of(canvas.glyphs.ellipsis) and len(marks) > 1:
        for mark in marks:
            yield from _draw_one_line([mark], line, number, canvas)
        return
    window = _window(line, start, end, canvas.columns, canvas.glyphs.ellipsis)
    yield canvas.row(number, (window.text(line), ""))
    for places, together in groupby(zip(cells, marks, strict=True), key=lambda pair: pair[0]):
        left, right = min(window.place(places[0]), canvas.columns - 1), window.place(places[1])
        yield from _underline([mark for _, mark in together], left, max(right, left + 1), canvas)


def _underline(marks: Sequence[Mark], left: int, right: int, canvas: Canvas) -> Iterator[Text]:
    """Draw one underline with the messages of all marks that share it."""
    loudest = next((mark for mark in marks if mark.is_primary), marks[0])
    drawn = (loudest.underline * (right - left), loudest.style)
    beside = right + 1
    if all(_fits_beside(mark, beside, canvas) for mark in marks):
        lines = [line for mark in marks for line in _message(mark, beside, canvas)]
        yield canvas.row(None, (" " * left, ""), drawn, (" ", ""), *lines[0])
        for line in lines[1:]:
            yield canvas.row(None, (" " * beside, ""), *line)
        return
    yield canvas.row(None, (" " * left, ""), drawn)
    for mark in marks:
        yield from _message_below(mark, left, canvas)


def _fits_beside(mark: Mark, beside: int, canvas: Canvas) -> bool:
    free = canvas.columns - beside
    if free >= width_of(mark.heading) + width_of(mark.body):
        return True
    longest = max(width_of(word) for word in mark.body.split() or [""])
    # A word longer than the column would be cut; Chinese has no such words.
    return free >= _ENOUGH_BESIDE and (free >= width_of(mark.heading) + longest or width_of(mark.body) > len(mark.body))


def _message_below(mark: Mark, left: int, canvas: Canvas) -> Iterator[Text]:
    indent = max(0, min(left, canvas.columns - _ENOUGH_BELOW))
    for line in _message(mark, indent, canvas):
        yield canvas.row(None, (" " * indent, ""), *line)


def _message(mark: Mark, indent: int, canvas: Canvas) -> list[list[tuple[str, str]]]:
    """Return the lines of a message, each as styled parts; further lines are aligned with the first one's text."""
    lead = width_of(mark.heading)
    hang = (" " * lead, "")
    free = canvas.columns - indent - lead
    first, *rest = wrap(mark.body, free)
    lines = [[(mark.heading, f"bold {mark.style}"), (first, mark.style)]]
    lines.extend([hang, (line, mark.style)] for line in rest)
    lines.extend([hang, (line, QUIET_STYLE)] for words in mark.around for line in wrap(words, free))
    return lines


def _draw_lines(mark: Mark, first: DisplayLine, canvas: Canvas) -> Iterator[Text]:
    """Draw a span of several lines: a bracket on their left, the message at its end."""
    span = mark.span
    assert span is not None
    glyphs, style, columns = canvas.glyphs, mark.style, canvas.columns - 2
    start = first.offsets[span.start]
    window = _window(first, start, start + 1, columns, glyphs.ellipsis)
    opens_line = not first.cut(0, start).strip()
    yield canvas.row(span.line, (f"{glyphs.span_open if opens_line else ' '} ", style), (window.text(first), ""))
    if not opens_line:
        tail = glyphs.span_line * (window.place(start) + 1) + mark.underline
        yield canvas.row(None, (glyphs.span_top + tail, style))

    shown = range(span.line + 1, span.end_line)
    folded = len(shown) > _LINES_SHOWN_AT_TOP
    for number in shown[: _LINES_SHOWN_AT_TOP - 1] if folded else shown:
        yield _inner_line(mark, number, canvas)
    if folded:
        yield canvas.row(None, (f"{glyphs.span_side} ", style), (glyphs.ellipsis, QUIET_STYLE))

    last = display(source_line(mark.label.frame.file, span.end_line) or "")
    end = last.offsets[span.end]
    window = _window(last, max(end - 1, 0), end, columns, glyphs.ellipsis)
    yield canvas.row(span.end_line, (f"{glyphs.span_side} ", style), (window.text(last), ""))
    place = max(window.place(end) - 1, 0)
    bracket = glyphs.span_bottom + glyphs.span_line * (place + 1) + mark.underline
    beside = width_of(bracket) + 1
    if _fits_beside(mark, beside, canvas):
        lines = _message(mark, beside, canvas)
        yield canvas.row(None, (bracket, style), (" ", ""), *lines[0])
        for line in lines[1:]:
            yield canvas.row(None, (" " * beside, ""), *line)
    else:
        yield canvas.row(None, (bracket, style))
        yield from _message_below(mark, 2, canvas)


def _inner_line(mark: Mark, number: int, canvas: Canvas) -> Text:
    line = display(source_line(mark.label.frame.file, number) or "")
    window = _window(line, 0, 0, canvas.columns - 2, canvas.glyphs.ellipsis)
    return canvas.row(number, (f"{canvas.glyphs.span_side} ", mark.style), (window.text(line), ""))
