"""A fix as replacements of whole lines, for the formats in which editors take them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from gradsan.model import Fix
from gradsan.present._places import shown_path

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
