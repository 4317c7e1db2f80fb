"""Canvas of a drawn report: its width, colours and language, and the moves that all parts share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.text import Text

from gradsan import text
from gradsan.model import Message
from gradsan.present._cells import Glyphs, width_of, wrap

SEVERITY_STYLE = {"error": "bold red", "warning": "bold yellow", "note": "bold cyan"}
ROLE_STYLE = {
    "saved": "cyan",
    "written": "yellow",
    "used": "red",
    "bridge": "magenta",
    "created": "cyan",
    "freed": "yellow",
    "suspect": "yellow",
    "note": "blue",
    "origin": "yellow",
    "path": "blue",
    "noticed": "red",
}
FRAME_STYLE = "blue"
QUIET_STYLE = "dim"
NEW_CODE_STYLE = "green"


def word(language: str, name: str, /, **values: Any) -> str:
    """Return one of the presenters' own words, from the table ``ui`` of the text room."""
    return text.say(Message(f"ui.{name}", values), language)


@dataclass(frozen=True, slots=True)
class Canvas:
    """Where and how one diagnosis is drawn. ``digits`` is the width of its line numbers, ``width`` in cells."""

    language: str
    width: int
    digits: int
    glyphs: Glyphs
    cwd: Path | None

    @property
    def room(self) -> int:
        """Cells to the right of the bar."""
        return self.width - self.indent

    @property
    def indent(self) -> int:
        """Cells up to and including the bar and its space."""
        return self.digits + 2 + width_of(self.glyphs.bar)

    def word(self, name: str, /, **values: Any) -> str:
        """Return one of the presenters' own words."""
        return word(self.language, name, **values)

    def say(self, message: Message) -> str:
        """Return a message in the language of this report."""
        return text.say(message, self.language)

    def head(self, name: str) -> str:
        """Return ``name`` as the head of what follows it: with a colon."""
        return name + self.word("colon")

    def row(self, line: int | None, *parts: tuple[str, str]) -> Text:
        """Return a row beside the bar, with its line number where it has one; parts are (text, style)."""
        number = "" if line is None else str(line)
        return Text.assemble((f"{number:>{self.digits}} {self.glyphs.bar} ", FRAME_STYLE), *parts)

    def paragraph(self, head: tuple[str, str], body: str, style: str = "", indent: int = 0) -> list[Text]:
        """Return ``body`` after ``head``, wrapped; further lines stand under the begin of the body.

        Where the head takes more than half of the width, they stand four cells in from ``indent``.
        """
        begin = indent + width_of(head[0])
        hang = begin if begin <= self.width // 2 else indent + 4
        first, *rest = wrap(body, self.width - hang, self.width - begin)
        rows = [Text.assemble(" " * indent, head, (first, style))]
        rows.extend(Text.assemble(" " * hang, (line, style)) for line in rest)
        return rows

    def remark(self, name: str, body: str, style: str = "") -> list[Text]:
        """Return a paragraph such as ``= why: ...`` beneath the snippets."""
        return self.paragraph((f"= {self.head(self.word(name))}", "bold"), body, style, indent=self.digits + 1)
