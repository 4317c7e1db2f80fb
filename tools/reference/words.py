"""The words of the reference pages: those around what is generated, and the Chinese of what exists in English only."""

from __future__ import annotations

import sys
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from gradsan.text import Language

_FOLDER = Path(__file__).parent
_TOML = "tomllib" if sys.version_info >= (3, 11) else "tomli"

asked: set[str] = set()
"""English texts for which a page in another language has needed a translation."""


def word(key: str, language: Language) -> str:
    """What the pages say themselves: the entry ``key`` of ``words.toml``. Raises KeyError where it has none."""
    text: str = _read("words.toml")[language][key]
    return text.strip()


def translated(english: str, language: Language) -> str:
    """A docstring's paragraph or a description of the schema in ``language``; the English one where nobody wrote it.

    White space does not count, so that a line may be broken elsewhere.
    """
    if language == "en" or not english:
        return english
    asked.add(_normal(english))
    return translations().get(_normal(english), english)


@cache
def translations() -> dict[str, str]:
    """The Chinese of each English text, by the English with normal white space."""
    return {_normal(entry["en"]): entry["zh"].strip() for entry in _read("translations.toml")["text"]}


def _normal(text: str) -> str:
    return " ".join(text.split())


@cache
def _read(name: str) -> dict[str, Any]:
    with (_FOLDER / name).open("rb") as stream:
        content: dict[str, Any] = import_module(_TOML).load(stream)
    return content
