"""Source lines in colours with numbered marks, and below each line its events."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

from pygments.lexers.python import PythonLexer
from pygments.token import Comment, Keyword, Number, Operator, String, Token

from gradsan.present._canvas import Canvas
from gradsan.present._places import shown_path
from gradsan.present._snippet import Mark
from gradsan.present.html._markup import Html, escaped, join, opened, tag
from gradsan.source.tree import source_line, source_lines

Stretch = tuple[int, int, str]
"""A part of a line: start and end (exclusive) from 0, and its CSS class."""

_CLASSES = ((Keyword, "kw"), (Operator.Word, "kw"), (String, "st"), (Number, "nu"), (Comment, "co"))
_LINES_ABOVE = 300
_BEGINS = re.compile(r"(?:def|class|async|if|for|while|with|try|import|from)\b|@")
_lexer = PythonLexer(stripnl=False, ensurenl=False)


def colours_of(file: str, numbers: Iterable[int]) -> Mapping[int, tuple[Stretch, ...]]:
    """Return the coloured stretches of lines of ``file`` (from 1), by line.

    Tokenizing begins at the enclosing statement: a line may be in the middle of a string.
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
    """Return the coloured stretches of each line of Python source; none for text that is no Python."""
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
    """Return the characters of ``line`` from ``start`` to ``end`` as coloured markup."""
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
    """Return the line of the outermost statement around line ``first``; ``first`` itself if it is far away."""
    above = range(first, max(first - _LINES_ABOVE, 0), -1)
    return next((number for number in above if _BEGINS.match(lines[number - 1])), first)


_AROUND = 2
_MARKED_LINES_SHOWN = 12


def snippets(marks: Sequence[Mark], key: str, canvas: Canvas) -> Html:
    """Return one listing per file, in order of appearance; ``key`` makes the ids of a diagnosis unique."""
    files = dict.fromkeys(mark.label.frame.file for mark in marks)
    return join(*(_listing(file, marks, key, canvas) for file in files))


def mark_id(key: str, index: int) -> str:
    """Return the id of the message of the mark with this index."""
    return f"{key}-mark-{index}"


def badge(mark: Mark, index: int, key: str) -> Html:
    """Return the number of a mark, as a link to its message."""
    shown = mark.heading.strip().rstrip(".") or "•"
    where = f"#{mark_id(key, index)}"
    return tag("a", shown, class_=f"badge {mark.label.role}", href=where, aria_label=mark.name)


def _listing(file: str, marks: Sequence[Mark], key: str, canvas: Canvas) -> Html:
    here = [(index, mark) for index, mark in enumerate(marks) if mark.label.frame.file == file]
    numbers = sorted({number for _, mark in here for number in _numbers(mark)})
    colours = colours_of(file, numbers)
    rows: list[Html] = []
    before: int | None = None
    for number in numbers:
        line = source_line(file, number)
        said = [(index, mark) for index, mark in here if mark.label.frame.line == number]
        if line is None and not said:
            continue
        if before is not None and number > before + 1:
            rows.append(tag("div", "⋯", class_="skipped", aria_hidden="true"))
        before = number
        if line is None:
            code = tag("span", canvas.word("no_source"), class_="quiet")
        else:
            code = _code(line, number, here, key, colours.get(number, ()))
        is_marked = "line marked" if said else "line"
        rows.append(tag("div", _number(file, number, said, canvas), tag("code", code), class_=is_marked))
        rows += [_words(mark, index, key, canvas) for index, mark in said]
    name = opened(tag("bdi", shown_path(file, canvas.cwd)), file, here[0][1].label.frame.line, None, canvas)
    return tag("figure", tag("figcaption", name), tag("div", *rows, class_="code"), class_="listing")


def _number(file: str, number: int, said: Sequence[tuple[int, Mark]], canvas: Canvas) -> Html:
    """Return the number of a line; that of a marked one links to the reader's editor."""
    if not said:
        return tag("span", number, class_="number")
    return opened(number, file, number, said[0][1].label.frame.column, canvas, class_="number")


def _numbers(mark: Mark) -> Iterable[int]:
    frame = mark.label.frame
    end = max(mark.span.end_line if mark.span else frame.line, frame.line)
    return range(max(frame.line - _AROUND, 1), min(end, frame.line + _MARKED_LINES_SHOWN) + _AROUND + 1)


def _code(line: str, number: int, marks: Sequence[tuple[int, Mark]], key: str, colours: Sequence[Stretch]) -> Html:
    """Return a line, cut where marks begin or end; a piece has the roles of all marks over it."""
    spans = [
        (index, mark, *_cells(mark, number, line))
        for index, mark in marks
        if mark.span and mark.span.line <= number <= mark.span.end_line
    ]
    cuts = sorted({0, len(line), *(cut for _, _, start, end in spans for cut in (start, end))})
    pieces: list[Html] = []
    for start, end in pairwise(cuts):
        begun = [
            badge(mark, index, key)
            for index, mark, first, _ in spans
            if first == start and mark.span and mark.span.line == number
        ]
        over = [mark for _, mark, first, last in spans if first <= start and end <= last]
        text = paint(line, colours, start, end)
        if over:
            roles = dict.fromkeys(mark.label.role for mark in over)
            primary = " primary" if any(mark.is_primary for mark in over) else ""
            text = tag("mark", text, class_=f"{' '.join(roles)}{primary}")
        pieces += [*begun, text]
    return join(*pieces)


def _cells(mark: Mark, number: int, line: str) -> tuple[int, int]:
    span = mark.span
    assert span is not None
    start = span.start if span.line == number else len(line) - len(line.lstrip())
    end = span.end if span.end_line == number else len(line.rstrip())
    start = min(max(start, 0), len(line))
    return start, min(max(end, start), len(line))


def _words(mark: Mark, index: int, key: str, canvas: Canvas) -> Html:
    number = mark.heading.strip().rstrip(".") or "•"
    around = (tag("span", line, class_="quiet around") for line in mark.around)
    name = mark.label.frame.function
    function = tag("span", name, class_="quiet function") if name != "<module>" else None
    head = tag("span", number, class_=f"badge {mark.label.role}", aria_hidden="true")
    said = tag("span", mark.body, class_="words")
    return tag(
        "div", head, said, function, *around, id=mark_id(key, index), class_=f"said {mark.label.role}", tabindex=-1
    )
