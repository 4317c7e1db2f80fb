"""Whole stacks, drawn on request."""

from __future__ import annotations

from collections.abc import Iterator

from rich.text import Text

from gradsan.model import Frame
from gradsan.present._canvas import QUIET_STYLE, Canvas
from gradsan.present._marks import Mark
from gradsan.present._places import location, shown_stack
from gradsan.source.tree import source_line


def draw_stack(mark: Mark, canvas: Canvas) -> Iterator[Text]:
    """Draw every frame of the user and of libraries that led to a mark, outermost first; libraries are dimmed."""
    frames = shown_stack(mark.label.site)
    if not frames:
        return
    yield from canvas.remark("stack", canvas.word("stack_of", label=mark.name))
    for frame in frames:
        yield from _draw_frame(frame, canvas)


def _draw_frame(frame: Frame, canvas: Canvas) -> Iterator[Text]:
    style = "" if frame.is_user else QUIET_STYLE
    indent = canvas.digits + 3
    place = canvas.word("frame", place=location(frame, canvas.cwd), function=frame.function)
    yield from canvas.paragraph(("", ""), place, style, indent=indent)
    source = (source_line(frame.file, frame.line) or "").strip()
    if source:
        yield from canvas.paragraph(("", ""), source, style, indent=indent + 4)
