"""Sentences for Messages, in a language."""

from __future__ import annotations

import os
import re
import string
import sys
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from importlib.resources import files
from typing import Any

from gradsan.model import Message

_FALLBACK = "en"
_TOML = "tomllib" if sys.version_info >= (3, 11) else "tomli"

_SPACE_IN_CHINESE = re.compile(r"(?<=[\u3001-\u9fff\uff00-\uffef]) (?=[\u3001-\u9fff\uff00-\uffef])")
"""A template has a space beside a field, for names in Latin letters; between Chinese characters it is removed."""


def say(message: Message, language: str) -> str:
    """Return the sentence of ``message``.

    Fields such as ``{name}`` are filled from ``message.values``; a value that is itself a Message is worded first, in
    the same language; ``{name:memory}`` shows a number of bytes in units. Where the key has two sentences, ``one`` and
    ``other``, the value ``count`` chooses (``one`` for 1). A key missing in ``language`` is worded in English, and one
    that English lacks too appears as itself; a field without a value appears as ``{field}``. So a user always gets a
    report.

    Raises:
        KeyError: for a missing key or value, only if the environment has ``GRADSAN_TEXT=strict`` (tests).
    """
    template = _template(message, language)
    if template is None:
        return message.key
    values = {
        name: say(value, language) if isinstance(value, Message) else value for name, value in message.values.items()
    }
    said = _Formatter(message.key).vformat(template, (), values)
    return _SPACE_IN_CHINESE.sub("", said) if language == "zh" else said


@cache
def sentences(language: str) -> Mapping[str, str]:
    """Return all sentences of ``language`` by dotted key, from the ``.toml`` files of its folder; empty if none.

    Raises:
        TypeError: if a value is neither a string nor a table.
        ValueError: if two files have the same key.
    """
    folder = files(__package__) / language
    if not folder.is_dir():
        return {}
    said: dict[str, str] = {}
    for source in sorted(folder.iterdir(), key=lambda one: one.name):
        if not source.name.endswith(".toml"):
            continue
        for key, sentence in _flatten(import_module(_TOML).loads(source.read_text(encoding="utf-8")), ""):
            if key in said:
                raise ValueError(f"{source.name} says {key} again")
            said[key] = sentence
    return said


def _flatten(table: Mapping[str, Any], prefix: str) -> list[tuple[str, str]]:
    flat: list[tuple[str, str]] = []
    for name, value in table.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping):
            flat += _flatten(value, f"{key}.")
        elif isinstance(value, str):
            flat.append((key, value))
        else:
            raise TypeError(f"{key} is a {type(value).__name__}; a message is a string")
    return flat


def _template(message: Message, language: str) -> str | None:
    key = message.key
    for known in map(sentences, (language, _FALLBACK)):
        if key in known:
            return known[key]
        if "count" in message.values:
            counted = known.get(f"{key}.{'one' if message.values['count'] == 1 else 'other'}")
            if counted is not None:
                return counted
        if _is_strict():
            raise KeyError(f"no message {key!r} in text/{language}/*.toml")
    return None


class _Formatter(string.Formatter):
    """str.format that, outside tests, leaves fields without a value in place."""

    def __init__(self, key: str) -> None:
        self.key = key

    def get_value(self, key: int | str, args: Any, kwargs: Mapping[str, Any]) -> Any:
        if key in kwargs:
            return kwargs[str(key)]
        if _is_strict():
            raise KeyError(f"message {self.key!r} has a field {{{key}}} that was given no value")
        return f"{{{key}}}"

    def format_field(self, value: Any, format_spec: str) -> str:
        try:
            if format_spec == "memory":
                return _as_memory(value)
            return str(format(value, format_spec))
        except (TypeError, ValueError):
            if _is_strict():
                raise
            return str(value)


def _as_memory(count: float) -> str:
    """Return a number of bytes in units, as people write it."""
    size = float(max(count, 0))
    for unit in ("B", "KB", "MB"):
        if size < 1024:
            return f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:.1f} GB"


def _is_strict() -> bool:
    return os.environ.get("GRADSAN_TEXT") == "strict"
