"""``gradsan compare``: run the first rounds of a program compiled and as eager code, and say whether they agree."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gradsan._imports import torch_is_installed
from gradsan.cli import _parser
from gradsan.cli._parser import Subparsers, Words
from gradsan.launch.program import prepare
from gradsan.launch.reporting import ReportFile
from gradsan.launch.sentences import complain, write_to_stderr, write_to_stdout
from gradsan.model import Message
from gradsan.options import OptionsError, read_options
from gradsan.present import working_directory
from gradsan.present._places import shown_path
from gradsan.text import Language, choose_language, language_on, say

if TYPE_CHECKING:
    from gradsan.repair.compiled import Compared, CompareLimits
    from gradsan.repair.compiled.judging import Difference
    from gradsan.repair.trials.compiling import Fragment, Function


_DIFFERENCES_SHOWN = 6
_OPERATIONS_SHOWN = 6
_RESUMED = "torch_dynamo_resume_in_"


def rendered(compared: Compared, language: Language, cwd: Path | None, *, wrote: str | None) -> str:
    """Return all output lines; ``wrote`` is the file written on request."""
    messages = [_headline(compared), *_details(compared), *_where(compared, cwd, wrote)]
    lines = [say(messages[0], language), *(f"  {say(one, language)}" for one in messages[1:])]
    return "\n".join(lines) + "\n"


def _headline(compared: Compared) -> Message:
    values: dict[str, object] = {"difference": compared.largest, "allowed": compared.allowed}
    if compared.verdict == "same":
        is_beyond = compared.largest > compared.allowed
        return Message("compare.same_beyond" if is_beyond else "compare.same", values)
    if compared.verdict == "undecided":
        return Message("compare.undecided")
    if not compared.differences:
        return Message("compare.ends_differ")
    return Message("compare.differs", {"what": _named(compared.differences[0])})


def _details(compared: Compared) -> Iterator[Message]:
    yield from compared.reasons
    for one in compared.differences[:_DIFFERENCES_SHOWN]:
        values = {"what": _named(one), "difference": one.size, "allowed": one.allowed}
        if one.eager is None or one.compiled is None:
            yield Message("compare.one_missing", {**values, "which": "compiled" if one.compiled is None else "eager"})
        elif not math.isfinite(one.size):
            yield Message("compare.one_not_finite", {**values, "compiled": one.compiled, "eager": one.eager})
        else:
            yield Message(f"compare.one_{one.what}", {**values, "compiled": one.compiled, "eager": one.eager})
    more = len(compared.differences) - _DIFFERENCES_SHOWN
    if more > 0:
        yield Message("compare.more", {"count": more})
    yield Message(
        "compare.compared",
        {
            "rounds": compared.rounds,
            "losses": compared.losses,
            "gradients": compared.gradients,
            "parameters": compared.parameters,
        },
    )
    names = list(dict.fromkeys(compared.titles))
    shown = ", ".join(names[:_OPERATIONS_SHOWN]) + (", …" if len(names) > _OPERATIONS_SHOWN else "")
    backends = ", ".join(compared.backends)
    yield Message("compare.what_compiled", {"count": compared.graphs, "functions": shown, "backends": backends})
    for doubt in compared.doubts:
        yield Message("compare.note", {"what": doubt})
    for finding in compared.findings:
        yield Message("compare.finding", {"code": finding.code, "title": finding.title})


def _where(compared: Compared, cwd: Path | None, wrote: str | None) -> Iterator[Message]:
    fragment = compared.fragment
    if fragment is not None:
        yield from _of_fragment(fragment, cwd, wrote)
    elif compared.stage == "left_out" and compared.function is not None:
        yield Message("compare.stage_left_out", {"function": _function(compared.function, cwd)})
    elif compared.stage:
        yield Message(f"compare.stage_{compared.stage}")
    if wrote is not None and compared.verdict == "differs" and (fragment is None or not fragment.program):
        yield Message("compare.nothing_to_write")


def _of_fragment(fragment: Fragment, cwd: Path | None, wrote: str | None) -> Iterator[Message]:
    if not fragment.ops:
        yield Message("compare.graph_as_whole", {"function": _function(fragment.function, cwd)})
        return
    if fragment.layer[0]:
        yield Message("compare.layer", {"layer": fragment.layer[0], "kind": fragment.layer[1]})
    ops = ", ".join(fragment.ops[:_OPERATIONS_SHOWN]) + (", …" if len(fragment.ops) > _OPERATIONS_SHOWN else "")
    values = {"ops": ops, "difference": fragment.difference, "allowed": fragment.allowed}
    if fragment.overwritten is not None:
        yield Message("compare.operation_write", values)
    else:
        yield Message("compare.operation_gradient" if fragment.of_gradient else "compare.operation_result", values)
    if fragment.place is not None:
        file, line, text = fragment.place
        yield Message("compare.place", {"place": f"{shown_path(file, cwd)}:{line}", "text": text})
    key = "stage_aot" if fragment.also_aot else "stage_backend"
    yield Message(f"compare.{key}", {"backend": fragment.backend})
    if fragment.program:
        yield Message("compare.wrote", {"file": wrote}) if wrote is not None else Message("compare.how_to_write")


def _named(one: Difference) -> Message:
    return Message(f"compare.name_{one.what}", {"name": one.name, "round": one.round})


def _function(function: Function, cwd: Path | None) -> str:
    file, name = function
    if name.startswith(_RESUMED):
        name = name.removeprefix(_RESUMED).rpartition("_at_")[0]
    return f"{name} ({shown_path(file, cwd)})"


_SHARED = ("lang",)
_OWN = ("rounds", "timeout", "write", "json")
_FILES = ("json", "write")
_OUTPUT_SHOWN = 4000
"""The number of characters of the program's output that are shown if nothing else explains its end."""
_STATUS = {"same": 0, "differs": 66, "undecided": 1, "nothing_compiled": 2, "not_run": 1}


def add_parser(subparsers: Subparsers, words: Words) -> argparse.ArgumentParser:
    """Add ``compare`` to the commands of ``gradsan``; its ``handler`` is :func:`run`."""
    parser = _parser.add_program_parser(subparsers, "compare", words, "compare.")
    _parser.add_options_with_value(parser, _OWN, words, "compare")
    parser.add_argument("--yes", action="store_true", help=words("compare.option_yes"))
    _parser.add_options_with_value(parser, _SHARED, words)
    parser.set_defaults(handler=run)
    return parser


def program_start(words: Sequence[str]) -> int:
    """Return the index in ``words``, which follow ``compare``, at which the program begins."""
    return _parser.program_start(words, (*_SHARED, *_OWN))


def run(namespace: argparse.Namespace) -> int:
    """Compare the program that ``namespace.program`` names: 0 the same, 66 they differ, 1 not decided.

    Raises:
        OptionsError: for invalid options, and if the program compiles nothing.
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
    from gradsan.cli.fix import is_agreed
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
        content = compared.as_json(lambda message: say(message, language))
        problem = files["json"].write(json.dumps(content, ensure_ascii=False, indent=2) + "\n")
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
