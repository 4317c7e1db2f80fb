"""Pieces of Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; a bar in a cell does not end it."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(_cell(cell) for cell in line) + " |\n" for line in lines)


def code(text: str) -> str:
    """Text as code within a line; an empty text stays empty."""
    return f"`{text}`" if text else ""


def fence(text: str, language: str) -> str:
    """Lines as a block of code."""
    return f"```{language}\n{text.strip()}\n```\n"


def join(*parts: str) -> str:
    """A page of these parts, with an empty line between them and one line end at the end."""
    return "\n\n".join(part.strip("\n") for part in parts if part.strip()) + "\n"


def _cell(text: str) -> str:
    # Within code a bar divides nothing, and a backslash would show.
    pieces = re.split(r"(`[^`]*`)", " ".join(text.split()))
    return "".join(piece if index % 2 else piece.replace("|", "\\|") for index, piece in enumerate(pieces))
