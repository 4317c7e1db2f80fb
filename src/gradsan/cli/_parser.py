"""argparse in gradsan's languages, and the parsing of a command that runs a program."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any, NoReturn, TypeAlias

from gradsan.launch.program import Target
from gradsan.model import Message
from gradsan.options import OptionsError
from gradsan.text import Language, choose_language, language_on, say

Subparsers: TypeAlias = "argparse._SubParsersAction[Any]"

Words: TypeAlias = Callable[[str], str]
"""Returns the sentence of a key; where no help is shown, the key itself, since reading the sentences takes time."""

NO_VALUE = object()
"""Value of an option that was written without one (``nargs="?"``, ``const=NO_VALUE``)."""

_HEADINGS = {
    "options": "heading_options",
    "optional arguments": "heading_options",
    "positional arguments": "heading_words",
}
_HELP_COLUMN = 24


def help_language() -> Language:
    """Return the language of ``--help``: that of the locale, or English if stdout cannot encode it."""
    return language_on(sys.stdout, choose_language("auto", os.environ))


class Parser(argparse.ArgumentParser):
    """An ArgumentParser in the language of the locale that raises OptionsError for wrong usage."""

    def __init__(self, *, words: Words, **settings: Any) -> None:
        """Take the settings of ArgumentParser; options cannot be abbreviated."""
        formatter = partial(_HelpFormatter, language=help_language())
        super().__init__(**{**settings, "allow_abbrev": False, "add_help": False, "formatter_class": formatter})
        self.add_argument("-h", "--help", action="help", help=words("cli.help"))

    def error(self, message: str) -> NoReturn:
        """Raise OptionsError with argparse's message."""
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

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return None if action.help is None else action.help.replace("%", "%%")

    def _format_args(self, action: argparse.Action, default_metavar: str) -> str:
        if action.const is NO_VALUE:
            # It is optional only so that gradsan itself can report it as missing.
            return str(action.metavar)
        return super()._format_args(action, default_metavar)


def add_program_parser(subparsers: Subparsers, name: str, words: Words, texts: str) -> argparse.ArgumentParser:
    """Add the command ``name``, whose usage ends with a program; its sentences are those of ``texts``."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        name,
        help=words(f"{texts}summary"),
        description=words(f"{texts}description"),
        usage=f"gradsan {name} [options] (SCRIPT | -m MODULE | -c CODE) [args ...]",
    )
    return parser


def add_options_with_value(
    parser: argparse.ArgumentParser, names: Iterable[str], words: Words, texts: str = "cli"
) -> None:
    """Add ``--name VALUE`` for each of ``names``; :func:`said` returns their values, unchecked.

    Their sentences are ``<texts>.option_<name>`` and ``<texts>.value_<name>``.
    """
    for name in names:
        field = name.replace("-", "_")
        parser.add_argument(
            f"--{name}",
            nargs="?",
            const=NO_VALUE,
            metavar=words(f"{texts}.value_{field}"),
            help=words(f"{texts}.option_{field}"),
        )


def said(namespace: argparse.Namespace, names: Iterable[str]) -> dict[str, Any]:
    """Return the values of those options among ``names`` that the command line gives.

    Raises:
        OptionsError: for an option without its value.
    """
    given: dict[str, Any] = {}
    for name in names:
        value = getattr(namespace, name.replace("-", "_"))
        if value is NO_VALUE:
            raise OptionsError(Message("cli.missing_value", {"name": f"--{name}"}))
        if value is not None:
            given[name] = value
    return given


def program_start(words: Sequence[str], with_value: Collection[str], with_number: Collection[str] = ()) -> int:
    """Return the index in ``words`` (those after the command) of the program: the script, ``-m``, ``-c`` or ``--``.

    ``with_value`` are the options whose value is the next word, ``with_number`` those for which it is if it is
    a number.
    """
    position = 0
    while position < len(words):
        word = words[position]
        if word in ("-", "--") or word[:1] != "-" or word[:2] in ("-m", "-c"):
            return position
        following = words[position + 1] if position + 1 < len(words) else ""
        name = word[2:] if word.startswith("--") else ""
        takes_next = name in with_value or (name in with_number and following.isdigit())
        position += 2 if takes_next else 1
    return len(words)


def target_of(words: Sequence[str]) -> Target:
    """Return the program named by the words after the options. Raises OptionsError if there is none."""
    rest = list(words[1:] if words[:1] == ["--"] else words)
    if not rest:
        raise OptionsError(Message("cli.no_program"))
    kind = {"-m": "module", "-c": "code"}.get(rest[0][:2])
    if kind is None:
        return Target("script", rest[0], tuple(rest[1:]))
    glued = rest.pop(0)[2:]
    if not glued and not rest:
        raise OptionsError(Message("cli.missing_value", {"name": "-m" if kind == "module" else "-c"}))
    name = glued or rest.pop(0)
    return Target("module" if kind == "module" else "code", name, tuple(rest))
