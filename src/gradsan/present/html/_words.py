"""The page's own words."""

from __future__ import annotations

from typing import Any

from gradsan import text
from gradsan.model import Message

_OF_THE_SCRIPT = (
    "beside",
    "event",
    "lane_backward",
    "lane_saved",
    "lane_step",
    "lane_used",
    "lane_written",
    "next_page",
    "page_of",
    "previous_page",
    "version",
)


def html_word(language: str, name: str, /, **values: Any) -> str:
    """Return one of the page's own words, from the table ``html`` of the text room."""
    return text.say(Message(f"html.{name}", values), language)


def script_words(language: str) -> dict[str, str]:
    """Return the words that the script fills itself, with their {fields}."""
    fields = ("what", "kind", "clock", "step", "op", "place", "count", "first", "last", "version", "total")
    braces = {name: f"{{{name}}}" for name in fields}
    return {name: html_word(language, name, **{key: braces[key] for key in fields}) for name in _OF_THE_SCRIPT}
