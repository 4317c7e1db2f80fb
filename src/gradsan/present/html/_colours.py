"""Colours of Python source: which characters of a line are a keyword, a string, a number or a comment."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

from pygments.lexers.python import PythonLexer
from pygments.token import Comment, Keyword, Number, Operator, String, Token

from gradsan.present.html._markup import Html, escaped, join, tag
from gradsan.source.tree import source_line, source_lines

Stretch = tuple[int, int, str]
"""Characters of a line from 0, the end exclusive, and the class that colours them."""

_CLASSES = ((Keyword, "kw"), (Operator.Word, "kw"), (String, "st"), (Number, "nu"), (Comment, "co"))
_LINES_ABOVE = 300
_BEGINS = re.compile(r"(?:def|class|async|if|for|while|with|try|import|from)\b|@")
_lexer = PythonLexer(stripnl=False, ensurenl=False)


def colours_of(file: str, numbers: Iterable[int]) -> Mapping[int, tuple[Stretch, ...]]:
    """The coloured stretches of lines of ``file`` (from 1), by line.

    The lines from the statement that they lie in are read with them: one may be the middle of a string.
    """
    shown = {number: line for number in numbers if (line := source_line(file, number)) is not None}
    whole = source_lines(file)
    is_whole = all(number <= len(whole) and whole[number - 1] == line for number, line in shown.items())
    found: dict[int, tuple[Stretch, ...]] = {}
    for first, last in _runs(sorted(shown)):
        begin = _begin(whole, first) if is_whole else first
        text = "\n".join([*whole[begin - 1 : first - 1], *(shown[number] for number in range(first, last + 1))])
        for number, stretches in enumerate(coloured(text), begin):
            if number >= first:
                found[number] = stretches
    return found


def coloured(text: str) -> list[tuple[Stretch, ...]]:
    """The coloured stretches of each line of Python source; what is no Python has none."""
    lines: list[list[Stretch]] = [[]]
    column = 0
    for kind, value in _lexer.get_tokens(text):
        name = next((name for group, name in _CLASSES if kind in group), "") if kind is not Token.Text else ""
        for index, part in enumerate(value.split("\n")):
            if index:
                lines.append([])
                column = 0
            if part and name:
                lines[-1].append((column, column + len(part), name))
            column += len(part)
    return [tuple(line) for line in lines]


def paint(line: str, stretches: Iterable[Stretch], start: int = 0, end: int | None = None) -> Html:
    """The characters of ``line`` from ``start`` to ``end`` as markup with their colours."""
    end = len(line) if end is None else end
    pieces: list[Html] = []
    at = start
    for first, last, name in stretches:
        first, last = max(first, at), min(last, end)
        if first < last:
            pieces += [escaped(line[at:first]), tag("span", line[first:last], class_=name)]
            at = last
    return join(*pieces, escaped(line[at:end]))


def _runs(numbers: list[int]) -> Iterator[tuple[int, int]]:
    first: int | None = None
    for index, number in enumerate(numbers):
        first = number if first is None else first
        if index + 1 == len(numbers) or numbers[index + 1] != number + 1:
            yield first, number
            first = None


def _begin(lines: tuple[str, ...], first: int) -> int:
    """The line of the outermost statement that line ``first`` lies in; ``first`` itself where it is far away."""
    above = range(first, max(first - _LINES_ABOVE, 0), -1)
    return next((number for number in above if _BEGINS.match(lines[number - 1])), first)
