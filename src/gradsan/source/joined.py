"""Lines of several statements (``opt.zero_grad(); loss.backward(); opt.step()``) read as one statement per line.

A change that moves, repeats or wraps a statement needs it on lines of its own. Within :func:`on_own_lines` every file
named by a value's frames is read with such lines split, and the frames point into the split text; the result
refers to lines of the original file again.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from gradsan.model import Fix, Frame, Lines
from gradsan.source.tree import SourceFile, lines_read_as, read_source, source_lines

_Value = TypeVar("_Value")
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class _Part:
    """A line of the split text: the characters of ``line`` from ``column`` on (both from 1), after ``indent``."""

    line: int
    column: int
    indent: str
    text: str


@dataclass(frozen=True, slots=True)
class _Split:
    """A file's text with its joined lines split; ``first`` maps each of its lines to the number of its first part."""

    parts: tuple[_Part, ...]
    first: tuple[int, ...]

    def to_parts(self, line: int, column: int, *, is_end: bool = False) -> tuple[int, int]:
        """The position in the split text of a position in the file (exclusive if ``is_end``)."""
        if not 1 <= line < len(self.first):
            return line + (len(self.parts) - len(self.first) + 1), column
        numbers = range(self.first[line - 1], self.first[line])
        at = column - 1 if is_end else column
        number = max((one for one in numbers if self.parts[one - 1].column <= at), default=numbers[0])
        part = self.parts[number - 1]
        return number, column - part.column + len(part.indent) + 1

    def to_file(self, number: int, column: int) -> tuple[int, int]:
        """The position in the file of a position in the split text."""
        if not 1 <= number <= len(self.parts):
            return number - (len(self.parts) - len(self.first) + 1), column
        part = self.parts[number - 1]
        return part.line, column - len(part.indent) - 1 + part.column

    def lines_to_file(self, file: str, changed: Mapping[int, str]) -> Lines:
        """``Fix.lines`` of the split text, translated to lines of the file."""
        found: list[tuple[str, int, str]] = []
        for line in sorted({self.to_file(number, 1)[0] for number in changed}):
            numbers = range(self.first[line - 1], self.first[line])
            if len(numbers) == 1:
                found.append((file, line, changed[numbers[0]]))
                continue
            rows: list[str] = []
            is_open = False
            for number in numbers:
                own = self.parts[number - 1].indent + self.parts[number - 1].text
                for row in changed.get(number, own).split("\n"):
                    # Unchanged statements stay on one line.
                    if row == own and is_open:
                        rows[-1] += f"; {own.strip()}"
                    elif row:
                        rows.append(row)
                    is_open = row == own and "#" not in row
            found.append((file, line, "\n".join(rows)))
        return tuple(found)


def on_own_lines(value: _Value, work: Callable[[_Value], _Result]) -> _Result:
    """``work(value)``, evaluated with the statements of joined lines on lines of their own.

    ``value`` and the result are made of dataclasses, tuples, lists and mappings. Files of the user's are split: parsing
    those of PyTorch takes longer than all the rest of a report. Where a frame on a joined line does not know its column
    (Python 3.10), nothing is split.
    """
    frames = list(_frames(value))
    files = {one.file for one in frames if one.is_user}
    splits = {file: split for file in files if (split := _split_of(file)) is not None}
    if not splits or any(one.file in splits and _is_undecided(splits[one.file], one) for one in frames):
        return work(value)
    texts = {file: tuple(part.indent + part.text for part in split.parts) for file, split in splits.items()}
    given = _mapped(value, functools.partial(_to_parts, splits), functools.partial(_lines_to_parts, splits))
    with lines_read_as(texts):
        result = work(given)
    return _mapped(result, functools.partial(_to_file, splits), functools.partial(_lines_to_file, splits))


def _is_undecided(split: _Split, frame: Frame) -> bool:
    is_inside = 1 <= frame.line < len(split.first)
    return frame.column is None and is_inside and split.first[frame.line] - split.first[frame.line - 1] > 1


def _split_of(file: str) -> _Split | None:
    """The split of the file's joined lines; None where it has none, or cannot be read."""
    if not any(";" in line for line in source_lines(file)):
        return None
    source = read_source(file)
    return None if source is None else _split_source(source)


@functools.lru_cache(maxsize=32)
def _split_source(source: SourceFile) -> _Split | None:
    cuts: dict[int, list[tuple[int, int, str]]] = {}
    for node in source.nodes:
        for block in ("body", "orelse", "finalbody"):
            for first, end, begin, indent in _joints(source, getattr(node, block, None)):
                cuts.setdefault(first, []).append((end, begin, indent))
    if not cuts:
        return None
    parts: list[_Part] = []
    starts: list[int] = []
    for line, text in enumerate(source.lines, 1):
        starts.append(len(parts) + 1)
        column, indent = 1, ""
        for end, begin, inner in sorted(cuts.get(line, ())):
            parts.append(_Part(line, column, indent, text[column - 1 : end - 1]))
            column, indent = begin, inner
        rest = text[column - 1 :]
        parts.append(_Part(line, column, indent, rest.rstrip().removesuffix(";") if column > 1 else rest))
    return _Split(tuple(parts), (*starts, len(parts) + 1))


def _joints(source: SourceFile, block: object) -> Iterator[tuple[int, int, int, str]]:
    """Line, end of the first statement, start of the second, and their indentation, where two share a line."""
    statements = [one for one in block if isinstance(one, ast.stmt)] if isinstance(block, list) else []
    for before, after in itertools.pairwise(statements):
        end, begin = source.span(before), source.span(after)
        head = source.span(statements[0])
        indent = source.indent(head)
        if end.end_line == begin.line and not indent.strip():
            yield begin.line, end.end_column, begin.column, indent


def _frames(value: object) -> Iterator[Frame]:
    if isinstance(value, Frame):
        yield value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _frames(getattr(value, field.name))
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from _frames(one)
    elif isinstance(value, tuple | list):
        for one in value:
            yield from _frames(one)


def _mapped(value: _Value, frame: Callable[[Frame], Frame], lines: Callable[[Lines], Lines]) -> _Value:
    """``value`` with every frame and every ``Fix.lines`` in it mapped; returned as it is where it contains none."""
    found: object = value
    if isinstance(value, Frame):
        found = frame(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        old = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        new = {name: _mapped(one, frame, lines) for name, one in old.items()}
        if isinstance(value, Fix):
            new["lines"] = lines(value.lines)
        changed = {name: one for name, one in new.items() if one is not old[name]}
        found = replace(value, **changed) if changed else value
    elif isinstance(value, Mapping):
        items = {key: _mapped(one, frame, lines) for key, one in value.items()}
        found = items if any(items[key] is not one for key, one in value.items()) else value
    elif isinstance(value, tuple | list):
        parts = [_mapped(one, frame, lines) for one in value]
        is_new = any(one is not other for one, other in zip(parts, value, strict=True))
        found = type(value)(parts) if is_new else value
    return found  # type: ignore[return-value]


def _to_parts(splits: Mapping[str, _Split], frame: Frame) -> Frame:
    split = splits.get(frame.file)
    return frame if split is None else _moved(frame, split.to_parts, functools.partial(split.to_parts, is_end=True))


def _to_file(splits: Mapping[str, _Split], frame: Frame) -> Frame:
    split = splits.get(frame.file)
    return frame if split is None else _moved(frame, split.to_file, split.to_file)


def _moved(
    frame: Frame, start: Callable[[int, int], tuple[int, int]], end: Callable[[int, int], tuple[int, int]]
) -> Frame:
    """The frame with its start and end mapped; without columns, only its line."""
    line, column = start(frame.line, frame.column or 1)
    if frame.column is None or frame.end_line is None or frame.end_column is None:
        return replace(frame, line=line)
    end_line, end_column = end(frame.end_line, frame.end_column)
    return replace(frame, line=line, column=column, end_line=end_line, end_column=end_column)


def _lines_to_parts(splits: Mapping[str, _Split], lines: Lines) -> Lines:
    found: list[tuple[str, int, str]] = []
    for file, line, text in lines:
        split = splits.get(file)
        if split is None or not 1 <= line < len(split.first):
            found.append((file, line, text))
            continue
        first, end = split.first[line - 1], split.first[line]
        found += [(file, first, text), *((file, number, "") for number in range(first + 1, end))]
    return tuple(found)


def _lines_to_file(splits: Mapping[str, _Split], lines: Lines) -> Lines:
    found: list[tuple[str, int, str]] = []
    for file in dict.fromkeys(one for one, _, _ in lines):
        changed = {line: text for one, line, text in lines if one == file}
        split = splits.get(file)
        found += split.lines_to_file(file, changed) if split is not None else [(file, *one) for one in changed.items()]
    return tuple(found)
