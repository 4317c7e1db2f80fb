"""The page of PyTorch's messages: each with the codes that explain it, by which a search finds them."""

from __future__ import annotations

from gradsan.diagnose.messages import wordings
from gradsan.text import Language, codes
from reference.markdown import join
from reference.words import word

_BOOSTED = "---\nsearch:\n  boost: 3\n---"


def pages(language: Language) -> dict[str, str]:
    """``messages.md``."""
    titles = {entry.code: entry.title for entry in codes(language)}
    parts = [_BOOSTED, f"# {word('messages_title', language)}", word("messages_intro", language)]
    for message, found in wordings():
        lines = [f"- [{code}](codes/{code}.md): {titles[code]}" for code in found]
        parts += [f"## {_plain(message)}", "\n".join(lines)]
    return {"messages.md": join(*parts)}


def quoted(code: str, language: Language) -> str:
    """The messages that lead to a code, as a section of its page; empty where there are none."""
    found = [message for message, codes_of in wordings() if code in codes_of]
    lines = "\n".join(f"- `{message.replace('`', '')}`" for message in found)
    return join(f"## {word('messages_of_code', language)}", lines) if found else ""


def _plain(message: str) -> str:
    return message.replace("<", "&lt;").replace("*", "\\*").replace("_", "\\_").replace("[", "\\[")
