"""Changed lines of a fix: as a unified diff, and as replacements of whole lines."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from gradsan.model import Fix
from gradsan.present._places import shown_path
from gradsan.source.tree import source_lines

_NO_NEWLINE = "\\ No newline at end of file"


def diff_of(fix: Fix, cwd: Path | None) -> str:
    """Return the fix as a unified diff that ``patch -p1`` and ``git apply`` take; "" where nothing concrete is known.

    It is ``fix.diff`` where there is one. Otherwise it is made from ``fix.lines`` and the files as they are now; a new
    text of several lines replaces one line by several, an empty one removes the line. A line that cannot be read
    leaves no honest diff of its file, so that file is left out.
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
    """Say after the last line of either side, where the diff shows it, that the file ends without a line break."""
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
    """``count`` lines of ``file`` from ``line`` on become ``new``; a count of 0 puts ``new`` before ``line``."""

    file: str
    line: int
    count: int
    new: tuple[str, ...]


def replacements_of(fix: Fix, cwd: Path | None) -> tuple[Replacement, ...]:
    """What a fix replaces: from its lines where it has them, else from its diff; empty where neither is known."""
    if fix.lines:
        return tuple(
            Replacement(shown_path(file, cwd), line, 1, tuple(new.rstrip("\n").split("\n")) if new.strip() else ())
            for file, line, new in fix.lines
        )
    return tuple(_of_diff(fix.diff))


def old_lines(diff: str) -> dict[tuple[str, int], str]:
    """The lines of the old files that a unified diff shows, by (file, line)."""
    return {(file, line): text for file, line, sign, text in _rows(diff) if sign in " -"}


def _of_diff(diff: str) -> Iterator[Replacement]:
    # What is replaced at one place: rows that follow each other without a kept one between them.
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
    """The rows of all hunks; an added one has the number of the old line that it comes before."""
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
                # A hunk that takes no line stands after the one it names.
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
