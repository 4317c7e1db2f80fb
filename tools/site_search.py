"""The search of the site: one index for each language, in which the page of a code is found by PyTorch's messages.

The theme knows one index for all languages, beside the root that each page names. Chinese pages name the folder of the
Chinese pages instead, which gets an index of its own.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from reference.message_page import messages_of

CHINESE = "zh/"
"""Where the Chinese pages lie in the site."""

_MOST = 8.0
_ROOT = re.compile(r'(<script id="__config"[^>]*>\s*\{.*?"base": ")([^"]*)(")')
_PAGE_OF_CODE = re.compile(r"reference/codes/(GS\d{3})\.html")


def with_own_index(html: str, url: str) -> str:
    """The page ``html`` at ``url`` with the folder of its own language as the root of the search."""
    if not url.startswith(CHINESE):
        return html
    above = "/".join([".."] * (url.count("/") - 1)) or "."
    return _ROOT.sub(rf"\g<1>{above}\g<3>", html, count=1)


def part(site: Path) -> None:
    """Part the index of all pages of ``site`` into one for each language, with an entry for each message of a code."""
    file = Path("search", "search_index.json")
    index = json.loads((site / file).read_text(encoding="utf-8"))
    for folder, languages in (("", ["en"]), (CHINESE, ["en", "zh"])):
        docs = [
            {**doc, "location": doc["location"].removeprefix(CHINESE)}
            for doc in index["docs"]
            if doc["location"].startswith(CHINESE) == bool(folder)
        ]
        messages = [entry for doc in docs for entry in _messages(doc["location"])]
        made = {"config": {**index["config"], "lang": languages}, "docs": [*docs, *messages]}
        (site / folder / file).parent.mkdir(parents=True, exist_ok=True)
        (site / folder / file).write_text(json.dumps(made, ensure_ascii=False, separators=(",", ":")), encoding="utf-8")


def _messages(location: str) -> Iterator[dict[str, Any]]:
    """An entry for each message that the page at ``location`` quotes; that of the likeliest code weighs most.

    The theme's index knows no length of texts: without the weight here, long messages are found for all others.
    """
    page = _PAGE_OF_CODE.fullmatch(location)
    for anchor, message, rank in messages_of(page[1]) if page is not None else ():
        boost = (_MOST - min(rank, 9) / 10) / math.sqrt(len(message.split()))
        yield {"location": f"{location}#{anchor}", "title": message, "text": "", "boost": boost}
