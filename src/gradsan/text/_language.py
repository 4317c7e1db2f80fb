"""Which language to speak."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

Language = Literal["en", "zh"]

LANGUAGES: tuple[Language, ...] = ("en", "zh")
"""The languages that the text room speaks. English comes first: it is what the others fall back to."""


def choose_language(option: Literal["en", "zh", "auto"], environ: Mapping[str, str]) -> Language:
    """The language for ``option``; ``auto`` asks the locale in ``environ``.

    As in POSIX, the first of ``LC_ALL``, ``LC_MESSAGES`` and ``LANG`` that is set and not empty decides: Chinese if it
    starts with ``zh``, English otherwise.
    """
    if option != "auto":
        return option
    locale = next((environ[name] for name in ("LC_ALL", "LC_MESSAGES", "LANG") if environ.get(name)), "")
    return "zh" if locale.lower().startswith("zh") else "en"
