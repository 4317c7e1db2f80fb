"""``gradsan compare``: run the first rounds of a program compiled and as eager code, and say whether they agree."""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from gradsan._imports import torch_is_installed
from gradsan.cli import _parser
from gradsan.cli._compare_report import rendered
from gradsan.launch.program import prepare
from gradsan.launch.reporting import ReportFile
from gradsan.launch.sentences import complain, write_to_stderr, write_to_stdout
from gradsan.model import Message
from gradsan.options import OptionsError, read_options
from gradsan.present import working_directory
from gradsan.text import Language, choose_language, language_on, say

if TYPE_CHECKING:
    from gradsan.repair.compiled import Compared, CompareLimits

_SHARED = ("lang",)
_OWN = ("rounds", "timeout", "write", "json")
_FILES = ("json", "write")
_OUTPUT_SHOWN = 4000
"""Characters of the program's output, where nothing else tells why it ended."""
_STATUS = {"same": 0, "differs": 66, "undecided": 1, "nothing_compiled": 2, "not_run": 1}


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Add ``compare`` to the commands of ``gradsan``; its ``handler`` is :func:`run`."""
    language = _parser.help_language()

    def words(key: str) -> str:
        return say(Message(f"compare.{key}"), language)

    parser = _parser.add_program_parser(subparsers, "compare", words("summary"), words("description"))
    _parser.add_options_with_value(parser, _OWN, words)
    parser.add_argument("--yes", action="store_true", help=words("option_yes"))
    _parser.add_options_with_value(parser, _SHARED, lambda key: say(Message(f"cli.{key}"), language))
    parser.set_defaults(handler=run)
    return parser


def program_start(words: Sequence[str]) -> int:
    """Where in ``words``, which follow ``compare``, the program begins."""
    return _parser.program_start(words, (*_SHARED, *_OWN))


def run(namespace: argparse.Namespace) -> int:
    """Compare the program that ``namespace.program`` names: 0 the same, 66 they differ, 1 not decided.

    Raises:
        OptionsError: for what cannot be understood or done, and where the program compiles nothing.
    """
    own = _parser.said(namespace, _OWN)
    directory = working_directory(None)
    options = read_options(_parser.said(namespace, _SHARED), os.environ, directory)
    language = language_on(sys.stdout, choose_language(options.lang, os.environ))
    limits = _limits(own)
    target = _parser.target_of(namespace.program)
    if target.kind == "script" and target.name == "-":
        raise OptionsError(Message("fix.no_stdin"))
    prepare(target)
    files: dict[str, ReportFile] = {name: ReportFile(own[name], directory) for name in _FILES if name in own}
    if not torch_is_installed():
        raise OptionsError(Message("cli.no_torch"))
    from gradsan.cli._applying import is_agreed
    from gradsan.repair.compiled import compare_program

    compared = compare_program(
        (target.kind, target.name, target.arguments),
        limits,
        lambda message: complain(message, language),
        directory,
        lambda message: namespace.yes or is_agreed(message, language),
    )
    if compared.verdict == "nothing_compiled":
        raise OptionsError(Message("compare.nothing_compiled"))
    _write(compared, own, files, language)
    if compared.verdict == "not_run":
        write_to_stderr(compared.output[-_OUTPUT_SHOWN:])
        for reason in compared.reasons:
            complain(reason, language)
    elif own.get("json") != "-":
        write_to_stdout(rendered(compared, language, directory, wrote=own.get("write")))
    return _STATUS[compared.verdict]


def _write(compared: Compared, own: Mapping[str, str], files: Mapping[str, ReportFile], language: Language) -> None:
    problem = None
    if "json" in files:
        told = compared.as_json(lambda message: say(message, language))
        problem = files["json"].write(json.dumps(told, ensure_ascii=False, indent=2) + "\n")
    fragment = compared.fragment
    if "write" in files and fragment is not None and fragment.program and problem is None:
        problem = files["write"].write(fragment.program)
        if problem is None and fragment.inputs:
            problem = ReportFile(f"{own['write']}.pt", working_directory(None)).write(fragment.inputs)
    if problem is not None:
        raise OptionsError(problem)


def _limits(own: Mapping[str, str]) -> CompareLimits:
    from gradsan.repair.compiled import CompareLimits

    default = CompareLimits()
    try:
        rounds, timeout = int(own.get("rounds", default.rounds)), float(own.get("timeout", default.timeout))
    except ValueError:
        raise OptionsError(Message("compare.bad_limit")) from None
    if rounds < 1 or not 0 < timeout < threading.TIMEOUT_MAX / 2:
        raise OptionsError(Message("compare.bad_limit"))
    return CompareLimits(rounds, timeout)
