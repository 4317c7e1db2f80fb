"""Sentence before it is put into a language."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Message:
    """A sentence by its key in ``gradsan/text/<language>/*.toml`` and the values that fill it.

    Words live in the text package only; a Message becomes a ``str`` when a presenter asks for it in a language.
    A value may itself be a Message.
    """

    key: str
    values: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        """The sentence, in the language of the environment."""
        from gradsan.text import choose_language, say

        return say(self, choose_language("auto", os.environ))
