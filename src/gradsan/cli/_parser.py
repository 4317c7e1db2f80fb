"""argparse, speaking gradsan's languages and reporting wrong usage as every other failure is reported."""

from __future__ import annotations

import argparse
import os
import shutil
from functools import partial
from typing import Any, NoReturn

from gradsan.model import Message
from gradsan.options import OptionsError
from gradsan.text import Language, choose_language, say

NO_VALUE = object()
"""Stands for the value of an option that was written without one (``nargs="?"``, ``const=NO_VALUE``)."""

_HEADINGS = {
    "options": "heading_options",
    "optional arguments": "heading_options",
    "positional arguments": "heading_words",
}
_HELP_COLUMN = 24


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that speaks the language of the locale and raises OptionsError for wrong usage."""

    def __init__(self, **settings: Any) -> None:
        """As ArgumentParser; options cannot be shortened."""
        language = choose_language("auto", os.environ)
        settings.update(allow_abbrev=False, add_help=False, formatter_class=partial(_HelpFormatter, language=language))
        super().__init__(**settings)
        self.add_argument("-h", "--help", action="help", help=say(Message("cli.help"), language))

    def error(self, message: str) -> NoReturn:
        """Raise OptionsError with what argparse says."""
        raise OptionsError(Message("cli.wrong_usage", {"text": message, "command": self.prog}))


class _HelpFormatter(argparse.HelpFormatter):
    def __init__(self, prog: str, *, language: Language, **settings: Any) -> None:
        columns = min(shutil.get_terminal_size().columns, 100) - 2
        if language == "zh":
            # argparse counts characters, and a Chinese one takes two columns.
            columns = _HELP_COLUMN + max(columns - _HELP_COLUMN, 0) // 2
        super().__init__(prog, **{"width": columns, "max_help_position": _HELP_COLUMN, **settings})
        self._language = language

    def add_usage(self, usage: Any, actions: Any, groups: Any, prefix: str | None = None) -> None:
        if prefix is None:
            prefix = say(Message("cli.heading_usage"), self._language) + " "
        super().add_usage(usage, actions, groups, prefix)

    def start_section(self, heading: str | None) -> None:
        key = _HEADINGS.get(heading or "")
        super().start_section(say(Message(f"cli.{key}"), self._language) if key else heading)

    def _format_args(self, action: argparse.Action, default_metavar: str) -> str:
        if action.const is NO_VALUE:
            # It may be left out only so that gradsan can say that it is missing.
            return str(action.metavar)
        return super()._format_args(action, default_metavar)
