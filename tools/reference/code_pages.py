"""A page for each code, which is what ``gradsan explain`` shows, and the list of all codes by family."""

from __future__ import annotations

import re
from itertools import groupby

from gradsan.text import CodeEntry, Language, codes, page
from reference.markdown import code, join, table
from reference.message_page import quoted
from reference.words import word


def pages(language: Language) -> dict[str, str]:
    """``codes/index.md``, and ``codes/GS111.md`` for each code."""
    known = {entry.code for entry in codes()}
    found = {
        f"codes/{entry.code}.md": join(
            _linked(page(entry.code, language), entry.code, known), quoted(entry.code, language)
        )
        for entry in codes()
    }
    return {"codes/index.md": _index(language), **found}


def _index(language: Language) -> str:
    parts = [f"# {word('codes_title', language)}", word("codes_intro", language)]
    for family, entries in groupby(codes(language), key=_family):
        head = [word(key, language) for key in ("code", "cause", "codes_meaning")]
        rows = [(f"[{entry.code}]({entry.code}.md)", code(entry.slug), entry.title) for entry in entries]
        parts += [f"## {family}xx: {word(f'family_{family}', language)}", table(head, rows)]
    return join(*parts)


def _family(entry: CodeEntry) -> str:
    return entry.code[:3]


def _linked(markdown: str, own: str, known: set[str]) -> str:
    """The page with links where its sentences name other codes; blocks and words of code stay as they are."""
    pieces = re.split(r"(^```.*?^```$|`[^`\n]+`)", markdown, flags=re.MULTILINE | re.DOTALL)
    return "".join(
        piece if index % 2 else re.sub(r"\bGS\d{3}\b", lambda found: _link(found[0], own, known), piece)
        for index, piece in enumerate(pieces)
    )


def _link(name: str, own: str, known: set[str]) -> str:
    return f"[{name}]({name}.md)" if name in known and name != own else name
