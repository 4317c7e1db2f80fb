"""The words of a command that runs a program: its own options first, then the program and what belongs to it."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from gradsan.cli._parser import NO_VALUE
from gradsan.cli._program import Target
from gradsan.model import Message
from gradsan.options import OptionsError


def add_program_parser(
    subparsers: argparse._SubParsersAction[Any], name: str, summary: str, description: str
) -> argparse.ArgumentParser:
    """Add the command ``name``, whose usage ends with a program."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        name,
        help=summary,
        description=description,
        usage=f"gradsan {name} [options] (SCRIPT | -m MODULE | -c CODE) [args ...]",
    )
    return parser


def add_options_with_value(parser: argparse.ArgumentParser, names: Iterable[str], words: Callable[[str], str]) -> None:
    """Add ``--name VALUE`` for each of ``names``; their values come from :func:`said`, and are not checked here.

    ``words`` gives the sentence for ``option_<name>`` and ``value_<name>``.
    """
    for name in names:
        field = name.replace("-", "_")
        parser.add_argument(
            f"--{name}",
            nargs="?",
            const=NO_VALUE,
            metavar=words(f"value_{field}"),
            help=words(f"option_{field}").replace("%", "%%"),
        )


def said(namespace: argparse.Namespace, names: Iterable[str]) -> dict[str, Any]:
    """The values of those options among ``names`` that the command line gives.

    Raises:
        OptionsError: for one that was written without its value.
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
    """Where in ``words``, which follow the command, the program begins: at the script, ``-m``, ``-c`` or after ``--``.

    ``with_value`` are the options whose value is the next word, ``with_number`` those for which it is one where it is
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
    """The program that the words after the options name. Raises OptionsError where they name none."""
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
