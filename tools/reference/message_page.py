"""The page of PyTorch's messages: each with the codes that explain it, by which a search finds them."""

from __future__ import annotations

from gradsan.diagnose.messages import wordings
from gradsan.text import Language, codes
from reference.markdown import join
from reference.words import word


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
