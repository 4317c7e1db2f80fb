"""``gradsan explain``: the page of a code or of a message of PyTorch's, or the list of codes, for a terminal."""

from __future__ import annotations

import argparse
import io
import os
import re
import sys
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from itertools import takewhile
from typing import TYPE_CHECKING, ClassVar, TextIO

from rich.console import Console, ConsoleOptions, RenderResult
from rich.markdown import Markdown, MarkdownElement, Paragraph
from rich.text import Text

from gradsan.cli._parser import Subparsers, Words
from gradsan.diagnose.messages import codes_of
from gradsan.launch.sentences import complain
from gradsan.model import Message
from gradsan.present._cells import wrap
from gradsan.text import Language, choose_language, codes, language_on, page, resolve, say

if TYPE_CHECKING:
    from rich.console import RenderableType

_WIDEST = 100
"""Columns; longer lines are hard to read."""


def add_parser(subparsers: Subparsers, words: Words) -> argparse.ArgumentParser:
    """Add ``explain`` to the commands of ``gradsan``; its ``handler`` is :func:`run`."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "explain", help=words("explain.summary"), description=words("explain.summary")
    )
    parser.add_argument("code", nargs="*", metavar="CODE", help=words("explain.code"))
    parser.add_argument("--lang", choices=("en", "zh", "auto"), default="auto", help=words("explain.lang"))
    parser.add_argument("--color", choices=("auto", "always", "never"), default="auto", help=words("explain.color"))
    parser.set_defaults(handler=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Print the page that ``args`` (``code``, ``lang``, ``color``) requests; return 0, or 2 if no page matches.

    ``code`` are the words of a code, a cause's name, or a message of PyTorch's; ``-`` reads it from stdin.
    """
    language = language_on(sys.stdout, choose_language(args.lang, os.environ))
    styled = _is_styled(args.color, sys.stdout, os.environ)
    asked = sys.stdin.read() if args.code == ["-"] else " ".join(args.code)
    if not args.code:
        _write(_styled_list(language) if styled else _plain_list(language), sys.stdout)
        return 0
    code = resolve(asked)
    found = (code,) if code is not None else codes_of(asked)
    if not found:
        complain(_not_found(asked), language)
        return 2
    if len(found) > 1:
        _write(_several(found, language), sys.stdout)
    else:
        _write(_styled_page(found[0], language) if styled else page(found[0], language), sys.stdout)
    return 0


def _several(found: Sequence[str], language: Language) -> str:
    """Return the codes that a message may have, each with its title."""
    titles = {entry.code: entry.title for entry in codes(language)}
    lines = [f"  {code}  {titles[code]}" for code in found]
    return "\n".join([say(Message("explain.several"), language), *lines, say(Message("explain.which"), language), ""])


def _not_found(asked: str) -> Message:
    if len(asked.split()) > 1:
        return Message("explain.unknown_message")
    names = [name for entry in codes() for name in (entry.code, entry.slug)]
    near = [name for name in names if name.startswith(asked.upper())][:5]
    if not near and not re.fullmatch(r"[Gg][Ss]\d{3}", asked):
        near = get_close_matches(asked.upper(), names, 12) or get_close_matches(asked.lower(), names, 12)
        # Of equally close ones, those with a common prefix.
        near = sorted(near, key=lambda name: (-_begins_alike(name, asked), name))[:3]
    if near:
        return Message("explain.unknown_code_like", {"code": asked, "names": ", ".join(near)})
    return Message("explain.unknown_code", {"code": asked})


def _begins_alike(one: str, other: str) -> int:
    """Return the length of the common prefix of two words."""
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(one.lower(), other.lower(), strict=False))))


def _is_styled(option: str, stream: TextIO | None, environ: Mapping[str, str]) -> bool:
    if option == "auto":
        return stream is not None and stream.isatty() and environ.get("TERM") != "dumb"
    return option == "always"


def _plain_list(language: Language) -> str:
    from rich.cells import cell_len

    heading = tuple(say(Message(f"explain.column_{name}"), language) for name in ("code", "slug", "title"))
    rows = [heading, *((entry.code, entry.slug, entry.title) for entry in codes(language))]
    widths = [max(cell_len(row[column]) for row in rows) + 2 for column in (0, 1)]
    lines = [
        "".join(cell + " " * (width - cell_len(cell)) for cell, width in zip(row, widths, strict=False)) + row[2]
        for row in rows
    ]
    return "\n".join([*lines, "", say(Message("explain.hint"), language), ""])


def _styled_list(language: Language) -> str:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column(say(Message("explain.column_code"), language), style="bold cyan", no_wrap=True)
    table.add_column(say(Message("explain.column_slug"), language), no_wrap=True)
    table.add_column(say(Message("explain.column_title"), language))
    for entry in codes(language):
        table.add_row(entry.code, entry.slug, entry.title)
    return _rendered(table, say(Message("explain.hint"), language))


def _styled_page(code: str, language: Language) -> str:

    return _rendered(TerminalMarkdown(page(code, language)))


def _rendered(*parts: RenderableType) -> str:
    from rich.console import Console

    console = Console(file=io.StringIO(), force_terminal=True)
    for part in parts:
        console.print(part, width=min(console.width, _WIDEST))
    written = console.file
    assert isinstance(written, io.StringIO)
    return written.getvalue()


def _write(text: str, stream: TextIO | None) -> None:
    """Write ``text``, with ``?`` for characters that the stream cannot encode; ignores a closed pipe."""
    if stream is None:
        return
    encoding = stream.encoding or "utf-8"
    try:
        stream.write(text.encode(encoding, "replace").decode(encoding))
        stream.flush()
    except BrokenPipeError:
        # The interpreter flushes once more at its end; give it a file that accepts the rest.
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


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
        """Read ``markdown``; colours of code are the terminal's own."""
        super().__init__(markdown, code_theme="ansi_dark")
