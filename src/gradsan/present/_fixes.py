"""Fixes in a report: the change, the changed lines as a diff, and whether the change was tried."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from rich.text import Text

from gradsan.model import Fix, Verification
from gradsan.present._canvas import FRAME_STYLE, NEW_CODE_STYLE, QUIET_STYLE, Canvas
from gradsan.present._cells import display
from gradsan.present._places import shown_path
from gradsan.source.tree import source_line, source_lines

_DIFF_STYLE = {"+": "green", "-": "red", "@": "cyan"}


def draw_fix(fix: Fix, home: str | None, canvas: Canvas, *, is_brief: bool = False) -> Iterator[Text]:
    """Draw one fix. Changed lines in another file than ``home`` are headed with that file's name.

    ``is_brief`` leaves the change itself out: for what failed while another fix passed.
    """
    yield from canvas.remark("help", canvas.say(fix.summary))
    if fix.lines and not is_brief:
        yield from _changed_lines(fix, home, canvas)
    elif fix.diff and not is_brief:
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
    """Draw a line of code for copying: it continues below where it does not fit, and nothing is left out."""
    line = display(row.rstrip())
    margin = canvas.digits + 3
    columns = canvas.columns - margin
    for start in range(0, max(line.width, 1), columns):
        bar = f"{'' if start else number:>{canvas.digits}} {canvas.glyphs.bar} "
        yield Text.assemble(" " * margin, (bar, FRAME_STYLE), (line.cut(start, start + columns), style))


def standing_of(fix: Fix, canvas: Canvas) -> str:
    """Return whether the change was run and its effect on the gradients; "" if nothing needs to be said."""
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
    for name, value in measures.items():
        if value is not None:
            said.append(canvas.word(name, value=value) if value < math.inf else canvas.word("gradients_differ"))
    if not said:
        return canvas.word(f"tried.{verification.status}_bare")
    return canvas.word(f"tried.{verification.status}", result=canvas.word("comma").join(said))


_NO_NEWLINE = "\\ No newline at end of file"


def diff_of(fix: Fix, cwd: Path | None) -> str:
    """Return the fix as a unified diff for ``patch -p1`` and ``git apply``; "" if no concrete change is known.

    It is ``fix.diff`` if there is one. Otherwise it is made from ``fix.lines`` and the current files; a new
    text of several lines replaces one line by several, an empty one removes the line. A file with a line that cannot
    be read is left out.
    """
    if fix.diff:
        return fix.diff
    files = dict.fromkeys(file for file, _, _ in fix.lines)
    return "".join(
        _file_diff(file, {line: new for name, line, new in fix.lines if name == file}, cwd) for file in files
    )


def _file_diff(file: str, changes: dict[int, str], cwd: Path | None) -> str:
    old = list(source_lines(file))
    if not all(1 <= line <= len(old) for line in changes):
        return ""
    new: list[str] = []
    for line, kept in enumerate(old, 1):
        new.extend(_lines_of(changes[line]) if line in changes else [kept])
    path = shown_path(file, cwd)
    before, after = (path, path) if Path(path).is_absolute() else (f"a/{path}", f"b/{path}")
    rows = list(difflib.unified_diff(old, new, before, after, lineterm=""))
    if rows and _lacks_last_newline(file):
        rows = _mark_last_lines(rows, old, new)
    return "".join(f"{row}\n" for row in rows)


def _lines_of(text: str) -> list[str]:
    return text.rstrip("\n").split("\n") if text.strip() else []


def _lacks_last_newline(file: str) -> bool:
    try:
        content = Path(file).read_bytes()
    except OSError:
        return False
    return bool(content) and not content.endswith((b"\n", b"\r"))


def _mark_last_lines(rows: list[str], old: list[str], new: list[str]) -> list[str]:
    """Note after the last line of either side, if the diff shows it, that the file has no final line break."""
    marked: list[str] = []
    old_line = new_line = 0
    for row in rows:
        marked.append(row)
        if row.startswith("@@"):
            old_line, new_line = _hunk_start(row)
            continue
        if row.startswith(("---", "+++")) and not old_line:
            continue
        ends_old = row[:1] in " -" and old_line == len(old)
        ends_new = row[:1] in " +" and new_line == len(new)
        old_line += row[:1] in " -"
        new_line += row[:1] in " +"
        if ends_old or ends_new:
            marked.append(_NO_NEWLINE)
    return marked


def _hunk_start(row: str) -> tuple[int, int]:
    _, old, new, *_ = row.split()
    return int(old[1:].split(",")[0]), int(new[1:].split(",")[0])


_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+\d+(?:,(\d+))? @@")

_Row = tuple[str, int, str, str]
"""File, line in the old file, sign (`` ``, ``-`` or ``+``), text."""


@dataclass(frozen=True, slots=True)
class Replacement:
    """Replacement of ``count`` lines of ``file`` from ``line`` on by ``new``; 0 inserts ``new`` before ``line``."""

    file: str
    line: int
    count: int
    new: tuple[str, ...]


def replacements_of(fix: Fix, cwd: Path | None) -> tuple[Replacement, ...]:
    """The replacements of a fix: from its lines if it has them, else from its diff; empty if neither is known."""
    if fix.lines:
        return tuple(
            Replacement(shown_path(file, cwd), line, 1, tuple(new.rstrip("\n").split("\n")) if new.strip() else ())
            for file, line, new in fix.lines
        )
    return tuple(_of_diff(fix.diff))


def old_lines(diff: str) -> dict[tuple[str, int], str]:
    """Return the lines of the old files that a unified diff shows, by (file, line)."""
    return {(file, line): text for file, line, sign, text in _rows(diff) if sign in " -"}


def _of_diff(diff: str) -> Iterator[Replacement]:
    # A replacement at one place: consecutive rows without a kept one in between.
    for is_kept, rows in groupby(_rows(diff), key=lambda row: row[2] == " "):
        if is_kept:
            continue
        places: dict[tuple[str, int], list[_Row]] = {}
        expected = None
        for row in rows:
            file, line, sign, _ = row
            if (file, line) != expected:
                start = (file, line)
            places.setdefault(start, []).append(row)
            expected = (file, line + (sign == "-"))
        for (file, line), group in places.items():
            new = tuple(text for _, _, sign, text in group if sign == "+")
            yield Replacement(file, line, sum(sign == "-" for _, _, sign, _ in group), new)


def _rows(diff: str) -> Iterator[_Row]:
    """Yield the rows of all hunks; an added one has the number of the old line that it comes before."""
    file: str | None = None
    line = old = new = 0
    for row in diff.split("\n"):
        hunk = _HUNK.match(row)
        if old <= 0 and new <= 0:
            if row.startswith("--- "):
                name = row[4:].partition("\t")[0]
                file = None if name == "/dev/null" else re.sub(r"^a/", "", name)
            elif hunk is not None:
                old, new = int(hunk[2] or 1), int(hunk[3] or 1)
                # A hunk without old lines comes after the line that it names.
                line = int(hunk[1]) + (old == 0)
            continue
        sign = row[:1] or " "
        if sign not in " +-":
            continue
        if file is not None:
            yield file, line, sign, row[1:]
        old -= sign in " -"
        new -= sign in " +"
        line += sign in " -"
