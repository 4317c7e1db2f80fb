"""Patches: a change of several files as new texts, with its diff, line mapping to disk, and writing."""

from __future__ import annotations

import ast
import contextlib
import difflib
import io
import os
import re
import shutil
import subprocess
import tempfile
import tokenize
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from gradsan.model import Diagnosis, Frame, Lines

_AUGMENTED = re.compile(r"(?P<target>\s*[\w.]+)\s*(?P<op>[-+*/@|&^]|//|\*\*|<<|>>)=\s")


class PatchError(ValueError):
    """Changed lines that do not apply to the file."""


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
        """The patch as a unified diff for people; paths below ``cwd`` are relative to it."""
        return "".join(_file_diff(file, content, cwd)[0] for file, content in sorted(self.files.items()))

    def diff_bytes(self, cwd: Path | None) -> bytes:
        """The same for ``git apply`` and ``patch -p1``: each file's lines in that file's own encoding."""
        diffs = (_file_diff(file, content, cwd) for file, content in sorted(self.files.items()))
        return b"".join(text.encode(encoding) for text, encoding in diffs)

    def line_before(self, file: str, line: int) -> tuple[int, bool]:
        """The line of the file on disk that ``line`` of its new text comes from, and whether both are equal.

        For an added line, the nearest.
        """
        content = self.files.get(file)
        if content is None:
            return line, True
        old, new = (_rows_of(file, text) for text in (Path(file).read_bytes(), content))
        for tag, start, end, begin, stop in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
            if begin <= line - 1 < stop:
                return min(start + line - begin, max(start + 1, end)), tag == "equal"
        return min(line, max(1, len(old))), False

    def without(self, earlier: Patch) -> Patch:
        """This patch less the changes of ``earlier`` that it contains as they are, or with more rows at that place."""
        files = dict(self.files)
        for file, content in earlier.files.items():
            old = _rows_of(file, Path(file).read_bytes())
            kept = list(_hunks(old, _rows_of(file, content)))
            own = [one for one in _hunks(old, _rows_of(file, files[file])) if one not in kept]
            for start, end, rows in reversed(own):
                old[start:end] = _rows_beside(rows, [one for *place, one in kept if place == [start, end]])
            files[file] = "".join(old).encode(decoded(file, content)[1])
        return Patch({file: text for file, text in files.items() if text != Path(file).read_bytes()})

    @property
    def size(self) -> int:
        """The number of changed lines; a replaced line counts once."""
        return max(self._rows("+"), self._rows("-"))

    @property
    def splits(self) -> bool:
        """Whether one line has become two, and nothing else is changed."""
        return (self._rows("-"), self._rows("+")) == (1, 2)

    @property
    def spells_out(self) -> bool:
        """Whether every changed line is an augmented assignment written out: ``x = x + y`` for ``x += y``."""
        rows = [row for row in self.diff(None).split("\n") if row[:3] not in ("+++", "---")]
        old, new = ([row[1:] for row in rows if row[:1] == sign] for sign in ("-", "+"))
        return len(old) == len(new) > 0 and all(map(_spells_out, old, new))

    @property
    def scatters(self) -> int:
        """How often added lines put a part into a new tensor with ``select_scatter`` or ``slice_scatter``."""
        rows = [row for row in self.diff(None).split("\n") if row[:1] == "+"]
        return sum(row.count("select_scatter(") + row.count("slice_scatter(") for row in rows)

    @property
    def shortens(self) -> bool:
        """Whether the program has fewer lines afterwards."""
        return self._rows("-") > self._rows("+")

    def _rows(self, sign: str) -> int:
        rows = [row for row in self.diff(None).split("\n") if row[:3] not in ("+++", "---")]
        return sum(row[:1] == sign for row in rows)


def _spells_out(old: str, new: str) -> bool:
    found = _AUGMENTED.match(old)
    return found is not None and new.startswith(f"{found['target']} = {found['target'].strip()} {found['op']} ")


def _changed(file: str, content: bytes | None, changes: Mapping[int, str]) -> bytes:
    if content is None:
        try:
            content = Path(file).read_bytes()
        except OSError as failure:
            raise PatchError(str(failure)) from None
    text, encoding = decoded(file, content)
    rows = _split_like_python(text)
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
            # A line inserted before an empty line keeps that line.
            keeps_empty = not body and changes[number].endswith("\n")
            text = changes[number] if keeps_empty else changes[number].rstrip("\n")
            added = [f"{one}{end}" for one in text.split("\n")]
            # The last line of a file may have no line end, and keeps it so.
            added[-1] = added[-1] if row != body else added[-1][: -len(end)]
            new.extend(added)
    result = "".join(new)
    try:
        ast.parse(result)
    except (SyntaxError, ValueError) as failure:
        raise PatchError(str(failure)) from None
    return result.encode(encoding)


def decoded(file: str, content: bytes) -> tuple[str, str]:
    """The text of a Python file by its encoding declaration or byte order mark, and the encoding for writing it.

    Raises:
        PatchError: where it is no text in that encoding.
    """
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
        return content.decode(encoding), encoding
    except (SyntaxError, UnicodeDecodeError) as failure:
        raise PatchError(f"{file}: {failure}") from None


def _split_like_python(text: str) -> list[str]:
    # Not str.splitlines: a form feed ends no line, a lone carriage return does.
    return io.StringIO(text, newline="").readlines()


def _rows_of(file: str, content: bytes) -> list[str]:
    return _split_like_python(decoded(file, content)[0])


def _rows_beside(rows: list[str], added: list[list[str]]) -> list[str]:
    """``rows`` without those that ``added`` has at the same place, where they begin or end with them."""
    for known in added:
        if rows[: len(known)] == known:
            return rows[len(known) :]
        if rows[-len(known) :] == known:
            return rows[: -len(known)]
    return rows


def _hunks(old: list[str], new: list[str]) -> Iterator[tuple[int, int, list[str]]]:
    """The changed rows: their place in ``old``, and the new ones."""
    for tag, start, end, begin, stop in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if tag != "equal":
            yield start, end, new[begin:stop]


def _file_diff(file: str, content: bytes, cwd: Path | None) -> tuple[str, str]:
    before = Path(file).read_bytes()
    encoding = decoded(file, before)[1].replace("utf-8-sig", "utf-8")
    # A byte order mark is part of the first line for tools that apply the diff.
    old, new = before.decode(encoding), content.decode(encoding)
    path = _shown(file, cwd)
    names = (path, path) if Path(path).is_absolute() else (f"a/{path}", f"b/{path}")
    said: list[str] = []
    for row in difflib.unified_diff(_rows(old), _rows(new), *names):
        said.append(row if row.endswith("\n") else f"{row}\n\\ No newline at end of file\n")
    return "".join(said), encoding


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


def dirty_files(patch: Patch) -> tuple[str, ...]:
    """The files of ``patch`` that are tracked by git and have uncommitted changes; empty without git."""
    return tuple(file for file in patch.files if _is_dirty(file))


@contextlib.contextmanager
def apply_patch(patch: Patch) -> Iterator[None]:
    """Write every file of ``patch``, each by one atomic replacement; restore all if the block raises.

    Raises:
        OSError: where a file cannot be written; then none has changed.
    """
    before = {file: Path(file).read_bytes() for file in patch.files}
    written: list[str] = []
    try:
        for file, content in patch.files.items():
            _replace(file, content)
            written.append(file)
        yield
    except BaseException:
        for file in written:
            _replace(file, before[file])
        raise


def _replace(file: str, content: bytes) -> None:
    # A link stays a link: its target is replaced.
    path = Path(os.path.realpath(file))
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        shutil.copymode(path, name)
        os.replace(name, path)  # noqa: PTH105
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)  # noqa: PTH108
        raise


def _is_dirty(file: str) -> bool:
    path = Path(file)
    try:
        done = subprocess.run(
            ["git", "status", "--porcelain", "--", path.name],
            cwd=path.parent,
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError:
        return False
    # Untracked files have no version to restore, which is no reason to ask.
    return done.returncode == 0 and any(not row.startswith("??") for row in done.stdout.splitlines())


def on_disk(diagnosis: Diagnosis, patch: Patch) -> Diagnosis:
    """``diagnosis`` with every frame moved to the line that it has without ``patch``."""
    if not patch.files:
        return diagnosis

    def moved(frame: Frame) -> Frame:
        if frame.file not in patch.files:
            return frame
        line, is_same = patch.line_before(frame.file, frame.line)
        if not is_same:
            return replace(frame, line=line, column=None, end_line=None, end_column=None)
        end = None if frame.end_line is None else patch.line_before(frame.file, frame.end_line)[0]
        return replace(frame, line=line, end_line=end)

    return diagnosis.with_frames(moved)
