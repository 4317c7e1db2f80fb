"""A docstring as Markdown."""

from __future__ import annotations

import re

from gradsan.text import Language
from reference.markdown import join
from reference.words import translated, word

_SECTIONS = {"Raises:": "raises", "Returns:": "returns"}


def as_markdown(docstring: str, language: Language) -> str:
    """The paragraphs of ``docstring``, which is cleaned of its indentation, in ``language``; sections as lists."""
    parts = []
    for paragraph in filter(None, re.split(r"\n\s*\n", docstring)):
        head, _, rest = paragraph.partition("\n")
        if head in _SECTIONS:
            parts += [f"**{word(_SECTIONS[head], language)}**", _entries(rest, language)]
        else:
            parts.append(_inline(translated(paragraph, language)))
    return join(*parts) if parts else ""


def _entries(text: str, language: Language) -> str:
    """Lines ``KeyError: when.``, each perhaps with further lines indented below it."""
    lines = []
    for entry in re.split(r"\n(?=    \S)", text):
        name, _, meaning = entry.strip().partition(": ")
        lines.append(f"- `{name}`: {_inline(translated(' '.join(meaning.split()), language))}")
    return "\n".join(lines)


def _inline(text: str) -> str:
    text = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", text)
    return text.replace("``", "`")
