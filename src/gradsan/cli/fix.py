"""``gradsan fix``: run a program, try what may mend it, and show, keep or apply what helped."""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradsan import __version__
from gradsan.cli._program import Target, prepare
from gradsan.cli._reporting import wants_color, width_of
from gradsan.cli._sentences import complain, write_to_stderr
from gradsan.cli._torch_import import torch_is_installed
from gradsan.cli.run import target_of
from gradsan.model import Message, Program, Report
from gradsan.options import OptionsError
from gradsan.text import Language, choose_language, say

if TYPE_CHECKING:
    from gradsan.repair import Found, Limits, Patch

_WITH_VALUE = ("json", "patch", "lang", "color", "steps", "timeout", "faults")


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> argparse.ArgumentParser:
    """Add ``fix`` to the commands of ``gradsan``; its ``handler`` is :func:`run`."""
    language = choose_language("auto", os.environ)

    def words(key: str) -> str:
        return say(Message(f"fix.{key}"), language).replace("%", "%%")

    parser: argparse.ArgumentParser = subparsers.add_parser(
        "fix",
        help=words("summary"),
        description=words("description"),
        usage="gradsan fix [options] (SCRIPT | -m MODULE | -c CODE) [args ...]",
    )
    parser.add_argument("--apply", nargs="?", type=int, const=1, metavar="N", help=words("option_apply"))
    parser.add_argument("--patch", metavar="FILE", help=words("option_patch"))
    parser.add_argument("--json", metavar="FILE", help=words("option_json"))
    parser.add_argument("--steps", type=int, default=20, metavar="N", help=words("option_steps"))
    parser.add_argument("--timeout", type=float, default=300.0, metavar="S", help=words("option_timeout"))
    parser.add_argument("--faults", type=int, default=5, metavar="N", help=words("option_faults"))
    parser.add_argument("--include", action="store_true", help=words("option_include"))
    parser.add_argument("--yes", action="store_true", help=words("option_yes"))
    parser.add_argument("--lang", choices=("en", "zh", "auto"), default="auto", help=words("option_lang"))
    parser.add_argument("--color", choices=("auto", "always", "never"), default="auto", help=words("option_color"))
    parser.set_defaults(handler=run)
    return parser


def program_start(words: Sequence[str]) -> int:
    """Where in ``words``, which follow ``fix``, the program begins."""
    position = 0
    while position < len(words):
        word = words[position]
        if word in ("-", "--") or word[:1] != "-" or word[:2] in ("-m", "-c"):
            return position
        takes_value = word.startswith("--") and word[2:] in _WITH_VALUE
        if word == "--apply" and position + 1 < len(words) and words[position + 1].isdigit():
            takes_value = True
        position += 2 if takes_value else 1
    return len(words)


def run(namespace: argparse.Namespace) -> int:
    """Find fixes for the program that ``namespace.program`` names; 0 where nothing is left to mend, else 1.

    Raises:
        OptionsError: for what cannot be understood or done.
    """
    from gradsan.repair import Limits

    language = choose_language(namespace.lang, os.environ)
    target = target_of(namespace.program)
    if target.kind == "script" and target.name == "-":
        raise OptionsError(Message("fix.no_stdin"))
    if namespace.steps < 0 or namespace.timeout <= 0 or namespace.faults < 1:
        raise OptionsError(Message("fix.bad_limit"))
    prepare(target)
    if not torch_is_installed():
        raise OptionsError(Message("cli.no_torch"))
    limits = Limits(
        steps=namespace.steps,
        timeout=namespace.timeout,
        faults=namespace.faults,
        include_libraries=namespace.include,
    )
    found = _search(target, limits, language)
    report = _report(found, target)
    if namespace.json is not None:
        _write(namespace.json, _as_json(report, language))
    if not found.diagnoses:
        return _say_nothing_found(found, language)
    _show(report, namespace.color, language)
    if not found.patches:
        complain(Message("fix.none_passed"), language)
        return 1
    if namespace.patch is not None:
        _write(namespace.patch, found.patches[0].diff(Path.cwd()))
        complain(Message("fix.patch_written", {"file": namespace.patch}), language)
    if namespace.apply is not None:
        return _apply(found.patches, namespace, target, limits, language)
    if namespace.patch is None:
        complain(Message("fix.how_to_apply"), language)
    return 0


def _search(target: Target, limits: Limits, language: Language) -> Found:
    from gradsan.repair import find_fixes

    def progress(message: Message) -> None:
        complain(message, language)

    asked = (target.kind, target.name, target.arguments)
    return find_fixes(asked, limits, progress, lambda message: say(message, language), Path.cwd())


def _apply(
    patches: tuple[Patch, ...], namespace: argparse.Namespace, target: Target, limits: Limits, language: Language
) -> int:
    from gradsan.repair import apply_patch, dirty_files

    if not 1 <= namespace.apply <= len(patches):
        raise OptionsError(Message("fix.no_such_fix", {"number": namespace.apply, "count": len(patches)}))
    patch = patches[namespace.apply - 1]
    dirty = dirty_files(patch)
    if dirty and not namespace.yes and not _agreed(dirty, language):
        complain(Message("fix.left_alone"), language)
        return 1
    try:
        with apply_patch(patch):
            after = _search(target, limits, language)
            if after.diagnoses or after.exception is not None or after.problems:
                raise _StillFailsError
    except _StillFailsError:
        complain(Message("fix.restored"), language)
        return 1
    except OSError as failure:
        raise OptionsError(Message("fix.cannot_write", {"reason": failure.strerror or str(failure)})) from None
    complain(Message("fix.applied", {"files": ", ".join(sorted(patch.files))}), language)
    return 0


class _StillFailsError(Exception):
    """The program, run again from disk, has a fault."""


def _agreed(dirty: tuple[str, ...], language: Language) -> bool:
    question = say(Message("fix.ask_dirty", {"files": ", ".join(dirty)}), language)
    if not sys.stdin or not sys.stdin.isatty():
        write_to_stderr(f"{question}\n")
        return False
    write_to_stderr(question)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _say_nothing_found(found: Found, language: Language) -> int:
    if found.problems:
        for problem in found.problems:
            complain(problem, language)
        return 1
    if found.exception is None:
        complain(Message("fix.nothing_to_do"), language)
        return 0
    write_to_stderr(found.output[-4000:])
    complain(Message("fix.not_explained", {"kind": found.exception[0]}), language)
    return 1


def _report(found: Found, target: Target) -> Report:
    return Report(
        program=Program(
            (target.name, *target.arguments), "finished" if found.exception is None else "failed", found.exception
        ),
        seen=found.seen,
        diagnoses=found.diagnoses,
        gradsan=__version__,
        torch=_torch_version(),
        python=platform.python_version(),
    )


def _torch_version() -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("torch")
    except PackageNotFoundError:
        return None


def _show(report: Report, color: str, language: Language) -> None:
    from gradsan.present import needs_ascii, render_terminal

    stream = sys.stderr
    write_to_stderr(
        render_terminal(
            report,
            language=language,
            color=wants_color(color, stream, os.environ),
            width=width_of(stream),
            stacks=False,
            cwd=Path.cwd(),
            ascii=needs_ascii(getattr(stream, "encoding", None)),
        )
    )


def _as_json(report: Report, language: Language) -> str:
    from gradsan.present import render_json

    return render_json(report, language=language, cwd=Path.cwd())


def _write(name: str, text: str) -> None:
    try:
        Path(name).write_text(text, encoding="utf-8")
    except OSError as failure:
        reason = failure.strerror or str(failure)
        raise OptionsError(Message("fix.cannot_write", {"reason": f"{name}: {reason}"})) from None
