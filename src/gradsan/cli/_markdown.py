"""Markdown for a terminal: rich's, with lines of Chinese broken where Chinese lines break."""

from __future__ import annotations

import re
from typing import ClassVar

from rich.console import Console, ConsoleOptions, RenderResult
from rich.markdown import Markdown, MarkdownElement, Paragraph
from rich.text import Text

from gradsan.present._cells import wrap

_SPACE_IN_CHINESE = re.compile(r"(?<=[\u3000-\u9fff\uff00-\uffef]) (?=[\u3000-\u9fff\uff00-\uffef])")


class _Paragraph(Paragraph):
    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        text = _without_spaces_in_chinese(self.text)
        rest = text
        for line in wrap(text.plain, options.max_width):
            start = rest.plain.index(line)
            yield rest[start : start + len(line)]
            rest = rest[start + len(line) :]


def _without_spaces_in_chinese(text: Text) -> Text:
    spaces = [match.start() for match in _SPACE_IN_CHINESE.finditer(text.plain)]
    first, *others = text.divide(spaces)
    return Text().join([first, *(piece[1:] for piece in others)])


class TerminalMarkdown(Markdown):
    """Rich's Markdown in the terminal's own colours, which suit light and dark backgrounds alike.

    Rich breaks lines at spaces only. Chinese has none, so paragraphs are broken here: also between Chinese characters,
    and without the space that a line end in the Markdown source would leave there.
    """

    elements: ClassVar[dict[str, type[MarkdownElement]]] = {**Markdown.elements, "paragraph_open": _Paragraph}

    def __init__(self, markdown: str) -> None:
        super().__init__(markdown, code_theme="ansi_dark")
