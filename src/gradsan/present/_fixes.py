"""Fixes as a report shows them: what to change, the changed lines, and whether the change was tried."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from rich.text import Text

from gradsan.model import Fix, Verification
from gradsan.present._canvas import FRAME_STYLE, NEW_CODE_STYLE, QUIET_STYLE, Canvas
from gradsan.present._cells import display
from gradsan.present._places import shown_path
from gradsan.source.tree import source_line

_DIFF_STYLE = {"+": "green", "-": "red", "@": "cyan"}


def draw_fix(fix: Fix, home: str | None, canvas: Canvas) -> Iterator[Text]:
    """Draw one fix. Changed lines in another file than ``home`` come under that file's name."""
    yield from canvas.remark("help", canvas.say(fix.summary))
    if fix.lines:
        yield from _changed_lines(fix, home, canvas)
    elif fix.diff:
        for row in fix.diff.rstrip("\n").split("\n"):
            yield from _code(row, _DIFF_STYLE.get(row[:1], ""), "", canvas)
    standing = standing_of(fix, canvas)
    if standing:
        yield from canvas.paragraph(("", ""), standing, QUIET_STYLE, indent=canvas.digits + 3)


def _changed_lines(fix: Fix, home: str | None, canvas: Canvas) -> Iterator[Text]:
    order = list(dict.fromkeys(file for file, _, _ in fix.lines))
    changes = sorted(fix.lines, key=lambda change: (order.index(change[0]), change[1]))
    for file, group in groupby(changes, key=lambda change: change[0]):
        if file != home:
            arrow = (f"{canvas.glyphs.arrow} ", FRAME_STYLE)
            yield from canvas.paragraph(arrow, shown_path(file, canvas.cwd), indent=canvas.digits + 3)
        for _, line, new in group:
            if new.strip():
                for index, row in enumerate(new.rstrip("\n").split("\n")):
                    yield from _code(row, NEW_CODE_STYLE, "" if index else str(line), canvas)
            else:
                old = source_line(file, line) or ""
                yield from _code(canvas.word("line_removed", code=old.strip()), QUIET_STYLE, str(line), canvas)


def _code(row: str, style: str, number: str, canvas: Canvas) -> Iterator[Text]:
    """Draw a line of code that somebody will copy: what does not fit goes on below, nothing is left out."""
    line = display(row.rstrip())
    margin = canvas.digits + 3
    columns = canvas.columns - margin
    for start in range(0, max(line.width, 1), columns):
        bar = f"{'' if start else number:>{canvas.digits}} {canvas.glyphs.bar} "
        yield Text.assemble(" " * margin, (bar, FRAME_STYLE), (line.cut(start, start + columns), style))


def standing_of(fix: Fix, canvas: Canvas) -> str:
    """Say whether the change was run and what it does to the gradients; "" where nothing needs to be said."""
    if fix.verification.status == "failed":
        return _tried(fix.verification, canvas)
    was_run = fix.verification.status == "passed"
    if fix.meaning == "preserved" and fix.how_changed is not None:
        meaning = canvas.say(fix.how_changed)
    elif fix.meaning == "preserved":
        known = "same" if fix.verification.training == "same" else "preserved" if was_run else "expected"
        meaning = canvas.word(f"meaning.{known}")
    elif was_run and fix.verification.training is None and fix.how_changed is not None:
        meaning = canvas.word("meaning.unknown", how=canvas.say(fix.how_changed))
    elif fix.how_changed is None:
        meaning = canvas.word("meaning.changed")
    else:
        meaning = canvas.word("meaning.changed_how", how=canvas.say(fix.how_changed))
    if not (fix.lines or fix.diff) and fix.verification.status == "not_run":
        return "" if fix.meaning == "preserved" else meaning
    return canvas.word("standing", tried=_tried(fix.verification, canvas), meaning=meaning)


def _tried(verification: Verification, canvas: Canvas) -> str:
    if verification.status == "not_run":
        return canvas.word("not_run")
    measures = {
        "gradient_difference": verification.gradient_difference,
        "time_ratio": verification.time_ratio,
        "memory_ratio": verification.memory_ratio,
    }
    said = [verification.detail] if verification.detail else []
    said.extend(canvas.word(name, value=value) for name, value in measures.items() if value is not None)
    if not said:
        return canvas.word(f"tried.{verification.status}_bare")
    return canvas.word(f"tried.{verification.status}", result=canvas.word("comma").join(said))
