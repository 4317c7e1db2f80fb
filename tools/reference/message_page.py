"""The page of PyTorch's messages: each with the codes that explain it, by which a search finds them."""

from __future__ import annotations

import re
from functools import cache

from gradsan.catalogue import VERSION_CHECK, rows
from gradsan.diagnose.messages import PARAMETER, REST_OF_FREED, RESULT, of_row
from gradsan.text import Language, codes
from reference.markdown import join
from reference.words import word

_REST_OF_CHECK = "[torch.FloatTensor …], which is output … of …, is at version …; expected version … instead"
_RESTS = {
    "freed_graph": f" ({REST_OF_FREED})",
    "unused_in_graph": ". Set allow_unused=True if this is the desired behavior.",
}
"""What follows the pattern of a message."""


def pages(language: Language) -> dict[str, str]:
    """``messages.md``."""
    titles = {entry.code: entry.title for entry in codes(language)}
    parts = [f"# {word('messages_title', language)}", word("messages_intro", language)]
    for message, found in wordings():
        lines = [f"- [{code}](codes/{code}.md): {titles[code]}" for code in found]
        parts += [f"## {_plain(message)}", "\n".join(lines)]
    return {"messages.md": join(*parts)}


def quoted(code: str, language: Language) -> str:
    """The messages that lead to a code, as a section of its page; empty where there are none."""
    lines = "\n".join(f"- `{message}`{{: #{anchor} }}" for anchor, message, _ in messages_of(code))
    return join(f"## {word('messages_of_code', language)}", lines) if lines else ""


def messages_of(code: str) -> list[tuple[str, str, int]]:
    """The messages that lead to a code: the anchor on its page, the words, and how many codes are likelier."""
    found = [(message, codes_of.index(code)) for message, codes_of in wordings() if code in codes_of]
    return [(f"message-{at}", message.replace("`", ""), rank) for at, (message, rank) in enumerate(found, 1)]


def _plain(message: str) -> str:
    return message.replace("`", "").replace("<", "&lt;").replace("*", "\\*").replace("_", "\\_").replace("[", "\\[")


@cache
def wordings() -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Every PyTorch message that has a code, with ``…`` for its variable parts, and its codes."""
    found: dict[str, tuple[str, ...]] = {
        f"{VERSION_CHECK}: {_REST_OF_CHECK}": tuple(dict.fromkeys((*RESULT, *PARAMETER))),
    }
    for row in rows():
        for pattern in row.patterns:
            codes = of_row(row.slug, row.raised_as)
            if codes and VERSION_CHECK not in pattern.pattern:
                found.setdefault(_in_words(pattern.pattern) + _RESTS.get(row.slug, ""), codes)
    return tuple(found.items())


def _in_words(pattern: str) -> str:
    """A pattern as a message that it matches; where it allows several wordings, the first."""
    text = re.sub(r"(?<!\\)\[\^(?:\\.|[^\]\\])*\][+*]?\??", "…", pattern)
    text = re.sub(r"\[(\w)\w*\](?=\w)", r"\1", text)
    while (shorter := _INNERMOST.sub(_choice, text)) != text:
        text = shorter
    text = re.sub(r"\\[dwsS][+*]?\??|\[[^\]]*\][+*]\??|\.[+*]\??", "…", text)
    text = re.sub(r"(\w)\?", r"\1", re.sub(r"\\(.)", r"\1", text.replace(r"\?", "\0"))).replace("\0", "?")
    return " ".join(re.sub(r"…(?:\W?…)+", "…", text).strip("^$").split())


_INNERMOST = re.compile(r"(?<!\\)\((\?P<\w+>|\?:|\?[=!]|\?<[=!])?((?:\\.|[^()\\])*)\)\??")


def _choice(group: re.Match[str]) -> str:
    kind = group[1] or ""
    if kind.startswith("?P"):
        return "…"
    return group[2].partition("|")[0] if kind == "?:" else ""
