"""A fix as replacements of whole lines, for the formats in which editors take them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from gradsan.model import Fix
from gradsan.present._places import shown_path

_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+\d+(?:,\d+)? @@")


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


def _of_diff(diff: str) -> list[Replacement]:
    found: list[Replacement] = []
    file: str | None = None
    line = left = start = gone = 0
    new: list[str] = []

    def close() -> None:
        nonlocal start, gone, new
        if file is not None and (gone or new):
            found.append(Replacement(file, start, gone, tuple(new)))
        start, gone, new = 0, 0, []

    for row in diff.split("\n"):
        hunk = _HUNK.match(row)
        if hunk is None and left <= 0 and row.startswith("--- "):
            close()
            line = 0
            name = row[4:].partition("\t")[0]
            file = None if name == "/dev/null" else re.sub(r"^a/", "", name)
        elif hunk is not None:
            close()
            left = int(hunk[2] or 1)
            # A hunk that takes no line stands after the one it names.
            line = int(hunk[1]) + (left == 0)
        elif row.startswith("-"):
            start = start or line
            gone, line, left = gone + 1, line + 1, left - 1
            continue
        elif row.startswith("+") and not (row.startswith("+++ ") and line == 0):
            start = start or line
            new.append(row[1:])
            continue
        elif row.startswith(" "):
            close()
            line, left = line + 1, left - 1
    close()
    return found
