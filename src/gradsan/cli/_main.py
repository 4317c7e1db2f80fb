"""Entry point of the command line: from its words to the module of a command, and ``--version``."""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import cast

from gradsan import __version__
from gradsan._session import Session
from gradsan.cli._parser import Parser, help_language
from gradsan.launch.sentences import complain, spoken_language, write_to_stdout
from gradsan.model import Message
from gradsan.options import OptionsError
from gradsan.text import say

_COMMANDS: Mapping[str, str] = {
    "run": "gradsan.cli.run",
    "fix": "gradsan.cli.fix",
    "compare": "gradsan.cli.compare",
    "lint": "gradsan.cli.lint",
    "report": "gradsan.cli.report",
    "explain": "gradsan.cli.explain",
    "mcp": "gradsan.cli.mcp",
}
"""Each module has ``add_parser(subparsers, words)``, which sets ``handler(namespace) -> int``. A command that is
followed by another program's words also has ``program_start(words) -> int``: those are passed on as ``program``."""

_WRONG_USAGE = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``gradsan`` with the words ``argv`` (None: those of the process) and return the exit status.

    Raises:
        KeyboardInterrupt: if it ended the program, so that the process dies of SIGINT as it would
           under python.
        SystemExit: after ``--help`` and ``--version``.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    language = spoken_language(words, os.environ)
    try:
        namespace = parse(words)
        handler = namespace.handler
        status: int = handler(namespace)
    except OptionsError as problem:
        complain(problem.message, language)
        return _WRONG_USAGE
    return status


def build_parser(commands: Iterable[str] | None = None, *, is_shown: bool = True) -> Parser:
    """Return the parser of ``gradsan`` with these commands (None: all), in the language of the locale.

    Where its help is not shown, it may be without sentences.

    Raises:
        KeyError: for an unknown command.
    """
    language = help_language()

    def words(key: str) -> str:
        return say(Message(key), language) if is_shown else key

    parser = Parser(prog="gradsan", description=words("cli.summary"), words=words)
    version = f"gradsan {__version__}"
    parser.add_argument("--version", action="version", version=version, help=words("cli.version"))
    subparsers = parser.add_subparsers(
        metavar="COMMAND", dest="command", parser_class=cast("type[Parser]", partial(Parser, words=words))
    )
    for name in _COMMANDS if commands is None else commands:
        import_module(_COMMANDS[name]).add_parser(subparsers, words)
    return parser


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Parse ``words``: ``handler`` runs the command, ``program`` are the words of the program to be run.

    Raises:
        OptionsError: for invalid words.
        SystemExit: after ``--help`` and ``--version``.
    """
    if sorted(words) == ["--verbose", "--version"]:
        return argparse.Namespace(handler=import_module("gradsan.cli._main").show)
    command = words[0] if words else ""
    commands = [name for name in _COMMANDS if command in (name, "-h", "--help")]
    if not commands and command != "--version":
        key = "unknown_command" if command else "no_command"
        raise OptionsError(Message(f"cli.{key}", {"name": command, "known": ", ".join(_COMMANDS)}))

    module = import_module(_COMMANDS[command]) if command in _COMMANDS else None
    program_start = getattr(module, "program_start", None)
    end = len(words) if program_start is None else 1 + program_start(words[1:])
    parser = build_parser(commands, is_shown=not {"-h", "--help"}.isdisjoint(words[:end]))
    namespace, unknown = parser.parse_known_args(words[:end])
    if unknown:
        raise OptionsError(Message("cli.unknown_option", {"command": command, "name": unknown[0]}))
    namespace.program = words[end:]
    return namespace


def show(_: argparse.Namespace) -> int:
    """Print the versions. The exit status is 1 if something cannot be watched."""
    language = help_language()
    lines = [f"gradsan {__version__}", f"Python {platform.python_version()}"]
    problems: tuple[Message, ...] = ()
    try:
        import torch
    except ImportError as failure:
        lines.append(say(Message("cli.verbose_none", {"error": str(failure)}), language))
    else:
        lines.append(f"torch {torch.__version__}")
        session = Session()
        session.start()
        session.stop()
        problems = session.problems
        if session.core is not None:
            lines.append(say(Message("cli.verbose_core", {"kind": session.core}), language))
        shown = [Message("cli.verbose_problem", {"problem": say(one, language)}) for one in problems]
        lines += [say(one, language) for one in shown or [Message("cli.verbose_fine")]]
    write_to_stdout("\n".join(lines) + "\n")
    return 1 if problems else 0
