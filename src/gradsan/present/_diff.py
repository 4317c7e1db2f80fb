"""A unified diff from the changed lines of a fix."""

from __future__ import annotations

import difflib
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
