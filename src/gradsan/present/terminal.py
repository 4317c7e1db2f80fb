"""Report for people: annotated source lines, the reason, what to change, and whole stacks on request."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from pathlib import Path

from rich.console import Console
from rich.text import Text

from gradsan.model import Diagnosis, Frame, Report
from gradsan.present._canvas import (
    QUIET_STYLE,
    SEVERITY_STYLE,
    Canvas,
    describe_gradient,
    describe_losses,
    describe_tensor,
    describe_watched,
)
from gradsan.present._cells import ASCII, UNICODE
from gradsan.present._fixes import draw_fix
from gradsan.present._places import location, primary_label, shown_stack, working_directory
from gradsan.present._snippet import Mark, draw_marks, marks_of
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


MIN_WIDTH = 40


def render_terminal(
    report: Report,
    *,
    language: str,
    color: bool,
    width: int,
    stacks: bool,
    cwd: Path | None = None,
    ascii: bool = False,
) -> str:
    """Return a report as text for a terminal, ending with a line break.

    No line takes more than ``width`` cells (40 at least). ``stacks`` adds every label's whole stack. ``ascii`` draws
    with ASCII characters only; words, names and source lines keep theirs, so write with an error handler such as
    ``backslashreplace`` if the encoding is narrow (see :func:`needs_ascii`). Source files are read by
    :mod:`linecache`, and shown relative to ``cwd`` (default: the process's own).
    """
    width = max(width, MIN_WIDTH)
    out = io.StringIO()
    console = Console(
        file=out,
        width=width,
        color_system="standard" if color else None,
        force_terminal=color,
        force_jupyter=False,
        force_interactive=False,
        no_color=not color,
        legacy_windows=False,
        highlight=False,
        markup=False,
        emoji=False,
    )
    for row in _rows(report, language, width, stacks, working_directory(cwd), ascii):
        row.rstrip()
        console.print(row, soft_wrap=True)
    return out.getvalue()


def _rows(report: Report, language: str, width: int, stacks: bool, cwd: Path | None, ascii: bool) -> Iterator[Text]:
    glyphs = ASCII if ascii else UNICODE
    for diagnosis in report.diagnoses:
        canvas = Canvas(language, width, _digits(diagnosis), glyphs, cwd)
        yield from _draw_diagnosis(diagnosis, stacks, canvas)
        yield Text()
    yield from _draw_summary(report, Canvas(language, width, 0, glyphs, cwd))


def _digits(diagnosis: Diagnosis) -> int:
    """Return the width of the widest line number of a diagnosis, at least 2."""
    frames = [label.frame for label in diagnosis.labels]
    lines = [max(frame.line, frame.end_line or 0) for frame in frames]
    lines.extend(line for fix in diagnosis.fixes for _, line, _ in fix.lines)
    return max(2, *(len(str(line)) for line in lines)) if lines else 2


def _draw_diagnosis(diagnosis: Diagnosis, stacks: bool, canvas: Canvas) -> Iterator[Text]:
    head = canvas.head(f"{canvas.word(f'severity.{diagnosis.severity}')}[{diagnosis.code}]")
    title = canvas.say(diagnosis.title)
    if diagnosis.count > 1:
        title = canvas.word("counted", title=title, count=diagnosis.count)
    yield from canvas.paragraph((head, SEVERITY_STYLE[diagnosis.severity]), title, "bold")

    marks = marks_of(diagnosis, canvas)
    yield from draw_marks(marks, canvas)
    if stacks:
        yield from _draw_stacks(marks, canvas)

    if diagnosis.tensor is not None:
        yield from canvas.remark("tensor", describe_tensor(diagnosis.tensor, canvas))
    yield from _draw_why(diagnosis, canvas)
    losses = describe_losses(diagnosis, canvas)
    if losses is not None:
        yield from canvas.remark("losses", "  ".join(losses))
    gradient = describe_gradient(diagnosis.gradient, diagnosis.silent, canvas)
    if gradient:
        yield from canvas.remark("gradient", gradient)
    primary = primary_label(diagnosis)
    results = [fix.verification.status for fix in diagnosis.fixes]
    for fix, result in zip(diagnosis.fixes, results, strict=True):
        is_brief = result == "failed" and "passed" in results
        yield from draw_fix(fix, primary.frame.file if primary else None, canvas, is_brief=is_brief)
    for note in diagnosis.notes:
        yield from canvas.remark("note", canvas.say_short(note))
    yield from canvas.remark("more", f"gradsan explain {diagnosis.code}", QUIET_STYLE)


def _draw_stacks(marks: Iterable[Mark], canvas: Canvas) -> Iterator[Text]:
    for mark in marks:
        yield from draw_stack(mark, canvas)


def _draw_why(diagnosis: Diagnosis, canvas: Canvas) -> Iterator[Text]:
    """Draw the explanation, then why backward needs the value, then the formula if the words do not contain it."""
    said = [canvas.say_short(diagnosis.explanation)]
    if diagnosis.why is not None:
        said.append(canvas.say_short(diagnosis.why.text))
    formula = diagnosis.why.formula if diagnosis.why else None
    if formula and not any(formula in words for words in said):
        said.append(formula)
    yield from canvas.remark("why", "\n".join(dict.fromkeys(said)))


def _draw_summary(report: Report, canvas: Canvas) -> Iterator[Text]:
    if report.seen.blind_spots:
        yield from canvas.paragraph(("", ""), canvas.word("blind_spots"), "bold")
        for spot in report.seen.blind_spots:
            yield from canvas.paragraph(("- ", ""), canvas.say(spot), indent=2)
    errors, warnings, notes = (
        sum(diagnosis.severity == severity for diagnosis in report.diagnoses)
        for severity in ("error", "warning", "note")
    )
    found = [canvas.word("errors", count=errors), canvas.word("warnings", count=warnings)]
    if notes:
        found.append(canvas.word("notes", count=notes))
    if not report.diagnoses and report.program.outcome == "failed":
        found = [canvas.word("nothing_explained")]
    style = SEVERITY_STYLE["error"] if errors else SEVERITY_STYLE["warning"] if warnings else "bold"
    comma = canvas.word("comma")
    if report.mode == "autopsy":
        body = canvas.word("summary_autopsy", found=comma.join(found))
    else:
        body = canvas.word("summary", found=comma.join(found), watched=describe_watched(report.seen, canvas))
    yield from canvas.paragraph((canvas.head("gradsan"), style), body)
