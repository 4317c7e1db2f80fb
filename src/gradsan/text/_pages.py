"""Pages of ``gradsan explain``, one Markdown file per code and language, and the choice of the language."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Literal

_FALLBACK: Literal["en"] = "en"


@dataclass(frozen=True, slots=True)
class CodeEntry:
    """A code that has a page: ``GS111``, its cause's slug ``state_carried_over``, and the page's title."""

    code: str
    slug: str
    title: str


@cache
def page(code: str, language: str) -> str:
    """Return the page of ``code`` (``GS111``) as Markdown; the English one if ``language`` has none.

    Its first line is ``# CODE title``, its first paragraph the slug in backticks.

    Raises:
        KeyError: if no page has that code.
    """
    if code not in _page_names(_FALLBACK):
        raise KeyError(f"no page for {code!r}")
    spoken = language if code in _page_names(language) else _FALLBACK
    return (files(__package__) / spoken / f"{code}.md").read_text(encoding="utf-8")


@cache
def codes(language: str = _FALLBACK) -> tuple[CodeEntry, ...]:
    """Return every code that has a page, in order of code, with its title in ``language``."""
    return tuple(_entry(page(code, language)) for code in _page_names(_FALLBACK))


def resolve(code_or_slug: str) -> str | None:
    """Return the code for a word such as ``gs111`` or ``state_carried_over`` (any case), or None."""
    wanted = code_or_slug.strip().lower().replace("-", "_")
    return next((entry.code for entry in codes() if wanted in (entry.code.lower(), entry.slug)), None)


@cache
def _page_names(language: str) -> tuple[str, ...]:
    folder = files(__package__) / language
    if not folder.is_dir():
        return ()
    return tuple(sorted(file.name.removesuffix(".md") for file in folder.iterdir() if file.name.endswith(".md")))


def _entry(markdown: str) -> CodeEntry:
    heading, slug = [line for line in markdown.splitlines() if line][:2]
    code, title = heading.removeprefix("# ").split(maxsplit=1)
    return CodeEntry(code, slug.strip("`"), title)


Language = Literal["en", "zh"]

LANGUAGES: tuple[Language, ...] = ("en", "zh")
"""The languages of the text package. English comes first, as the fallback."""


def choose_language(option: Literal["en", "zh", "auto"], environ: Mapping[str, str]) -> Language:
    """Return the language for ``option``; ``auto`` uses the locale in ``environ``.

    As in POSIX, the first of ``LC_ALL``, ``LC_MESSAGES`` and ``LANG`` that is set and not empty decides: Chinese if it
    starts with ``zh``, English otherwise.
    """
    if option != "auto":
        return option
    locale = next((environ[name] for name in ("LC_ALL", "LC_MESSAGES", "LANG") if environ.get(name)), "")
    return "zh" if locale.lower().startswith("zh") else "en"


_SAMPLES: Mapping[Language, str] = {"zh": "错误：梯度（“”）"}
"""Characters that a stream must be able to encode for a language other than English."""


def language_on(stream: object, language: Language) -> Language:
    """Return ``language``, or English if ``stream`` cannot encode its characters (Chinese on Windows' cp1252)."""
    try:
        _SAMPLES.get(language, "").encode(getattr(stream, "encoding", None) or "utf-8")
    except (UnicodeError, LookupError):
        return _FALLBACK
    return language
