"""A change of several files as new texts: made from the changed lines of a Fix, shown as a diff, kept byte for byte."""

from __future__ import annotations

import ast
import difflib
import io
import tokenize
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

Lines = tuple[tuple[str, int, str], ...]


class PatchError(ValueError):
    """Changed lines that cannot be laid over the file."""


@dataclass(frozen=True, slots=True)
class Patch:
    """New contents of files by absolute path: the bytes to write, in the file's own encoding and line ends."""

    files: Mapping[str, bytes] = field(default_factory=dict)

    def with_lines(self, lines: Lines) -> Patch:
        """This patch with changed lines (``model.Fix.lines``, numbered as in its own texts) on top.

        Raises:
            PatchError: where a line is not there, the file cannot be read, or the result is not Python.
        """
        files = dict(self.files)
        for file in dict.fromkeys(name for name, _, _ in lines):
            changes = {line: new for name, line, new in lines if name == file}
            files[file] = _changed(file, files.get(file), changes)
        return Patch(files)

    def diff(self, cwd: Path | None) -> str:
        """The patch as a unified diff for ``patch -p1`` and ``git apply``; paths below ``cwd`` are relative to it."""
        return "".join(_file_diff(file, content, cwd) for file, content in sorted(self.files.items()))

    @property
    def size(self) -> int:
        """How many lines change, a line that becomes another counting once."""
        rows = [row for row in self.diff(None).split("\n") if row[:3] not in ("+++", "---")]
        return max(sum(row[:1] == "+" for row in rows), sum(row[:1] == "-" for row in rows))


def _changed(file: str, content: bytes | None, changes: Mapping[int, str]) -> bytes:
    if content is None:
        try:
            content = Path(file).read_bytes()
        except OSError as failure:
            raise PatchError(str(failure)) from None
    text, encoding = _decoded(file, content)
    rows = text.splitlines(keepends=True) if "\r" not in text.replace("\r\n", "") else _split_like_python(text)
    if not all(1 <= line <= len(rows) for line in changes):
        raise PatchError(f"{file} has {len(rows)} lines")
    new: list[str] = []
    for number, row in enumerate(rows, 1):
        if number not in changes:
            new.append(row)
            continue
        body = row.rstrip("\r\n")
        end = row[len(body) :] or "\n"
        if changes[number].strip():
            added = [f"{one}{end}" for one in changes[number].rstrip("\n").split("\n")]
            # The last line of a file may have no line end, and keeps it so.
            added[-1] = added[-1] if row != body else added[-1][: -len(end)]
            new.extend(added)
    result = "".join(new)
    try:
        ast.parse(result)
    except (SyntaxError, ValueError) as failure:
        raise PatchError(str(failure)) from None
    return result.encode(encoding)


def _decoded(file: str, content: bytes) -> tuple[str, str]:
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
        return content.decode(encoding), encoding
    except (SyntaxError, UnicodeDecodeError) as failure:
        raise PatchError(f"{file}: {failure}") from None


def _split_like_python(text: str) -> list[str]:
    # A lone carriage return ends a line for Python's tokenizer, too.
    return io.StringIO(text, newline="").readlines()


def _file_diff(file: str, content: bytes, cwd: Path | None) -> str:
    old, _ = _decoded(file, Path(file).read_bytes())
    new, _ = _decoded(file, content)
    path = _shown(file, cwd)
    before, after = (path, path) if Path(path).is_absolute() else (f"a/{path}", f"b/{path}")
    rows = difflib.unified_diff(_rows(old), _rows(new), before, after)
    said: list[str] = []
    for row in rows:
        said.append(row if row.endswith("\n") else f"{row}\n\\ No newline at end of file\n")
    return "".join(said)


def _rows(text: str) -> list[str]:
    rows = text.split("\n")
    return [f"{row}\n" for row in rows[:-1]] + ([rows[-1]] if rows[-1] else [])


def _shown(file: str, cwd: Path | None) -> str:
    if cwd is None:
        return file
    try:
        return Path(file).resolve().relative_to(cwd.resolve()).as_posix()
    except ValueError:
        return file
