"""The command line, from its parser, and the settings, from the class that holds them."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields

from gradsan.cli import build_parser
from gradsan.options import Options, expected, spelled
from gradsan.text import Language, say
from reference.markdown import code, fence, join, table
from reference.words import word

_LOCALES = {"en": "C.UTF-8", "zh": "zh_CN.UTF-8"}


def pages(language: Language) -> dict[str, str]:
    """``cli.md``."""
    with _locale(language):
        parser = build_parser()
        parts = [f"# {word('cli_title', language)}", parser.description or "", word("cli_intro", language)]
        for name, command in _commands(parser).items():
            parts += [f"## gradsan {name}", *_command(command, language)]
        return {"cli.md": join(*parts, *_settings(parser, language))}


def _commands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    return {
        name: command
        for action in parser._actions
        if isinstance(action, argparse._SubParsersAction)
        for name, command in action.choices.items()
    }


def _command(parser: argparse.ArgumentParser, language: Language) -> list[str]:
    # A usage that the parser writes itself begins with a heading and may be broken into lines.
    usage = parser.usage or " ".join(re.sub(r"^\S+\s", "", parser.format_usage()).split())
    head = [word("option", language), word("meaning", language)]
    rows = [(_spelling(action), action.help or "") for action in parser._actions]
    return [parser.description or "", fence(usage, "text"), table(head, rows)]


def _spelling(action: argparse.Action) -> str:
    value = action.metavar or ("{" + ",".join(map(str, action.choices)) + "}" if action.choices else "")
    takes_value = bool(value) and action.nargs != 0
    words = action.option_strings or [str(value)]
    # ``const`` beside "?" may only serve to say that the value is missing; what may be left out has a type or a number.
    optional = action.nargs == "?" and isinstance(action.const, int)
    shown = f" [{value}]" if optional else f" {value}"
    return ", ".join(code(name + shown if takes_value and action.option_strings else name) for name in words)


def _settings(parser: argparse.ArgumentParser, language: Language) -> list[str]:
    helps = {action.dest: action.help or "" for action in _commands(parser)["run"]._actions}
    head = [word(key, language) for key in ("setting", "takes", "default", "meaning")]
    rows = [
        (code(spelled(field.name)), say(expected(field.name), language), _default(field.default), helps[field.name])
        for field in fields(Options)
    ]
    return [f"## {word('settings_title', language)}", word("settings_intro", language), table(head, rows)]


def _default(value: object) -> str:
    if value is None or value == ():
        return ""
    return code(str(value).lower() if isinstance(value, bool) else str(value))


@contextmanager
def _locale(language: Language) -> Iterator[None]:
    """The locale from which the parser takes its language, and a width at which nothing is broken."""
    before = {name: os.environ.get(name) for name in ("LC_ALL", "COLUMNS")}
    os.environ.update(LC_ALL=_LOCALES[language], COLUMNS="1000")
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
