"""Text measured in terminal cells, and the characters that a report is drawn with.

A Chinese character takes two cells, a combining accent none. All drawing in this package counts cells, one character
at a time, so that underlines are below the characters they mark.
"""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass, fields

from rich.cells import get_character_cell_size

TAB_SIZE = 4

_WHITE = frozenset("\t\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029")
_NEVER_STARTS_A_LINE = frozenset("，。、；：？！）】》」』”’…·%,.;:?!)]}")
_NEVER_ENDS_A_LINE = frozenset("（【《「『“‘([{")


def visible(character: str) -> str:
    """Return the text that represents ``character`` on a terminal line.

    Control characters become their Unicode pictures, so that a source line can neither move the cursor nor colour
    the report. Characters without a shape of their own (joiners, direction marks, variation selectors) are dropped,
    because terminals disagree on their width and direction marks can make code look like other code.
    """
    code = ord(character)
    if code < 0x20:
        return chr(0x2400 + code)
    if 0x20 <= code < 0x7F:
        return character
    category = unicodedata.category(character)
    if category in ("Cc", "Cs", "Zl", "Zp"):
        return "\N{REPLACEMENT CHARACTER}"
    if category == "Cf" or 0xFE00 <= code <= 0xFE0F or 0xE0100 <= code <= 0xE01EF:
        return ""
    return character


def width_of(text: str) -> int:
    """Return the number of cells of cleaned text."""
    return sum(map(get_character_cell_size, text))


def clean(text: str) -> str:
    """Return ``text`` as one printable line: any white space is a space, the rest as by :func:`visible`."""
    return "".join(" " if character in _WHITE else visible(character) for character in text)


@dataclass(frozen=True, slots=True)
class DisplayLine:
    """A source line as shown on a terminal.

    ``offsets[i]`` is the cell at which character ``i`` of the source line begins; one more entry holds the end.
    """

    pieces: tuple[str, ...]
    offsets: tuple[int, ...]

    @property
    def width(self) -> int:
        """Cells of the whole line."""
        return self.offsets[-1]

    def cut(self, start: int, end: int) -> str:
        """Return the text in the cells from ``start`` to ``end``; a wide character cut in two becomes a space."""
        shown: list[str] = []
        for piece, left, right in zip(self.pieces, self.offsets, self.offsets[1:], strict=False):
            inside = min(right, end) - max(left, start)
            if left >= start and right <= end:
                shown.append(piece)
            elif inside > 0:
                shown.append(" " * inside)
        return "".join(shown)


def display(source: str) -> DisplayLine:
    """Return ``source`` (one line) with tabs expanded and every character's position in cells."""
    pieces: list[str] = []
    offsets = [0]
    for character in source:
        here = offsets[-1]
        piece = " " * (TAB_SIZE - here % TAB_SIZE) if character == "\t" else visible(character)
        pieces.append(piece)
        offsets.append(here + width_of(piece))
    return DisplayLine(tuple(pieces), tuple(offsets))


def wrap(text: str, width: int, first: int | None = None) -> list[str]:
    """Break text into one or more lines of at most ``width`` cells (at least 2); the first may have another width.

    Lines break at spaces, and between Chinese characters, never before closing or after opening punctuation. A word
    longer than a line is cut, after a dot if it has one. Line breaks in the text are kept.
    """
    width = max(width, 2)
    limit = width if first is None else max(first, 2)
    lines: list[str] = []
    for paragraph in text.splitlines() or [""]:
        lines.extend(_wrap_paragraph(clean(paragraph), width, width if lines else limit))
    return lines


def _wrap_paragraph(text: str, width: int, limit: int) -> list[str]:
    lines: list[str] = []
    line = ""
    for atom in _atoms(text):
        if width_of(line) + width_of(atom.rstrip()) <= limit:
            line += atom
            continue
        if line.strip() or limit < width >= width_of(atom.rstrip()):
            lines.append(line.rstrip())
            limit = width
            line = ""
        line += atom
        while width_of(line.rstrip()) > limit:
            head = _fitting(line, limit)
            lines.append(head)
            limit = width
            line = line[len(head) :]
    if line.strip() or not lines:
        lines.append(line.rstrip())
    return lines


def _fitting(text: str, width: int) -> str:
    taken = 0
    for index, character in enumerate(text):
        taken += get_character_cell_size(character)
        if taken > width:
            # A name is broken after a dot, if it has one late enough.
            dot = text.rfind(".", index // 2, index)
            return text[: dot + 1 if dot > 0 else max(index, 1)]
    return text


def _atoms(text: str) -> list[str]:
    """Split text into unbreakable pieces, each with the spaces that follow it."""
    atoms: list[str] = []
    for character in text:
        if atoms and not _may_break(atoms[-1][-1], character):
            atoms[-1] += character
        else:
            atoms.append(character)
    return atoms


def _may_break(left: str, right: str) -> bool:
    if right == " ":
        return False
    if left == " ":
        return True
    if right in _NEVER_STARTS_A_LINE or left in _NEVER_ENDS_A_LINE:
        return False
    return get_character_cell_size(left) == 2 or get_character_cell_size(right) == 2


@dataclass(frozen=True, slots=True)
class Glyphs:
    """Characters of a drawing.

    ``arrow`` opens a location, ``bar`` is beside line numbers, ``span_*`` draw a span of several lines, ``levels`` a
    curve. ``span_open`` is beside the first line of such a span, ``span_top`` begins a row of its own below that line.
    """

    arrow: str
    bar: str
    ellipsis: str
    span_open: str
    span_top: str
    span_side: str
    levels: str
    span_bottom: str
    span_line: str
    called_from: str


UNICODE = Glyphs(
    arrow="┌─",
    bar="│",
    ellipsis="…",
    span_open="╭",
    span_top="╭",
    span_side="│",
    span_bottom="╰",
    span_line="─",
    levels="▁▂▃▄▅▆▇█",
    called_from="←",
)

ASCII = Glyphs(
    arrow="-->",
    bar="|",
    ellipsis="...",
    span_open="/",
    span_top=" ",
    span_side="|",
    span_bottom="|",
    span_line="_",
    levels="_.-=*#",
    called_from="<-",
)


def needs_ascii(encoding: str | None) -> bool:
    """Whether a stream of this encoding cannot carry the box characters, so that ``ascii=True`` is needed."""
    try:
        "".join(getattr(UNICODE, field.name) for field in fields(Glyphs)).encode(encoding or "ascii")
    except (UnicodeError, LookupError):
        return True
    return False
