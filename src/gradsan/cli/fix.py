"""``gradsan fix``: run a program, try what may mend it, and show, keep or apply what helped."""

from __future__ import annotations

import argparse
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from gradsan._imports import torch_is_installed
from gradsan.cli import _parser
from gradsan.cli._fix_report import report_of, say_nothing_found, series, show
from gradsan.launch.program import Target, prepare
from gradsan.launch.reporting import ReportFile
from gradsan.launch.sentences import complain
from gradsan.model import Message
from gradsan.options import Options, OptionsError, read_options
from gradsan.present import render_json, working_directory
from gradsan.text import Language, choose_language, language_on, say

if TYPE_CHECKING:
    from gradsan.repair import Found, Limits

_SHARED = ("json", "lang", "color")
_OWN = ("patch", "steps", "timeout", "faults")
_FILES = ("json", "patch")
_SWITCHES = ("include", "yes")
_BEST = "best"

_Number = TypeVar("_Number", int, float)


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> argparse.ArgumentParser:
    """Add ``fix`` to the commands of ``gradsan``; its ``handler`` is :func:`run`."""
    language = _parser.help_language()

    def words(key: str) -> str:
        return say(Message(f"fix.{key}"), language)

    def shared_words(key: str) -> str:
        return say(Message(f"cli.{key}"), language)

    parser = _parser.add_program_parser(subparsers, "fix", words("summary"), words("description"))
    parser.add_argument("--apply", nargs="?", const=_BEST, metavar="N", help=words("option_apply"))
    _parser.add_options_with_value(parser, _OWN, words)
    for name in _SWITCHES:
        parser.add_argument(f"--{name}", action="store_true", help=words(f"option_{name}"))
    _parser.add_options_with_value(parser, _SHARED, shared_words)
    parser.set_defaults(handler=run)
    return parser


def program_start(words: Sequence[str]) -> int:
    """Where in ``words``, which follow ``fix``, the program begins."""
    return _parser.program_start(words, (*_SHARED, *_OWN), with_number=("apply",))


def run(namespace: argparse.Namespace) -> int:
    """Find fixes for the program that ``namespace.program`` names; 0 where nothing is left to mend, else 1.

    Raises:
        OptionsError: for what cannot be understood or done.
    """
    own = _parser.said(namespace, _OWN)
    shared = _parser.said(namespace, _SHARED)
    directory = working_directory(None)
    options = read_options(shared, os.environ, directory)
    language = language_on(sys.stderr, choose_language(options.lang, os.environ))
    limits = _limits(own, namespace.include)
    wanted = namespace.apply
    number = None if wanted in (None, _BEST) else _number("apply", wanted, int)
    target = _parser.target_of(namespace.program)
    if target.kind == "script" and target.name == "-":
        raise OptionsError(Message("fix.no_stdin"))
    prepare(target)
    # Only files named here: the one that `run` reports to by habit is not this report's.
    files = {name: ReportFile(path, directory) for name, path in {**own, **shared}.items() if name in _FILES}
    if not torch_is_installed():
        raise OptionsError(Message("cli.no_torch"))
    return _Fixing(target, limits, options, language, files).run(
        number, applies=wanted is not None, asks=not namespace.yes
    )


@dataclass(frozen=True, slots=True)
class _Fixing:
    """What was asked for."""

    target: Target
    limits: Limits
    options: Options
    language: Language
    files: Mapping[str, ReportFile]

    def run(self, number: int | None, *, applies: bool, asks: bool) -> int:
        """Search, show, keep and apply fix ``number``, None standing for the best; the exit status."""
        found = self._kept() if applies or "patch" in self.files else None
        if found is None:
            found = self._search(asks=asks)
            self._keep(found)
        report = report_of(found, self.target)
        self._write("json", lambda: render_json(report, language=self.language, cwd=working_directory(None)))
        if not found.diagnoses:
            return say_nothing_found(found, self.language)
        show(report, self.options, self.language)
        for sentence in series(found):
            complain(sentence, self.language)
        if not found.patches:
            from gradsan.repair import why_untried

            fixes = [fix for fault in found.diagnoses for fix in fault.fixes]
            was_tried = any(fix.verification.status != "not_run" for fix in fixes)
            complain(Message("fix.none_passed") if was_tried else why_untried(found.diagnoses), self.language)
            return 1
        is_kept = self._write("patch", lambda: found.patches[0].diff_bytes(working_directory(None)))
        if applies:
            return 0 if self._apply(found, number, asks=asks) else 1
        kept = Message("fix.patch_written", {"file": self.files["patch"].shown}) if is_kept else None
        complain(kept or Message("fix.how_to_apply"), self.language)
        return 0

    def _kept(self) -> Found | None:
        from gradsan.repair.kept import find_kept

        found = find_kept(self._asked(), self.limits, self.language)
        if found is not None:
            complain(Message("fix.found_before"), self.language)
        return found

    def _keep(self, found: Found) -> None:
        from gradsan.repair.kept import keep

        if found.diagnoses:
            keep(found, self._asked(), self.limits, self.language)

    def _search(self, *, asks: bool) -> Found:
        from gradsan.cli._applying import is_agreed
        from gradsan.repair import find_fixes

        return find_fixes(
            self._asked(),
            self.limits,
            lambda message: complain(message, self.language),
            lambda message: say(message, self.language),
            working_directory(None),
            lambda message: not asks or is_agreed(message, self.language),
        )

    def _apply(self, found: Found, number: int | None, *, asks: bool) -> bool:
        from gradsan.cli._applying import apply_fix, is_wanted
        from gradsan.repair import runs_well

        def is_well() -> bool:
            return runs_well(self._asked(), self.limits, lets_through=found.lets_through, ends_by=found.left)

        best = next(fix for fix in found.diagnoses[-1].fixes if fix.verification.status == "passed")
        if not is_wanted(best, number, asks=asks, language=self.language):
            return False
        return apply_fix(found.patches, 1 if number is None else number, is_well, asks=asks, language=self.language)

    def _asked(self) -> tuple[str, str, Sequence[str]]:
        return self.target.kind, self.target.name, self.target.arguments

    def _write(self, form: str, content: Callable[[], str | bytes]) -> bool:
        if form not in self.files:
            return False
        problem = self.files[form].write(content())
        if problem is not None:
            raise OptionsError(problem)
        return True


def _limits(own: Mapping[str, str], include: bool) -> Limits:
    from gradsan.repair import Limits

    default = Limits()
    limits = Limits(
        steps=_number("steps", own.get("steps", default.steps), int),
        timeout=_number("timeout", own.get("timeout", default.timeout), float),
        faults=_number("faults", own.get("faults", default.faults), int),
        include_libraries=include,
    )
    if limits.steps < 0 or not 0 < limits.timeout < threading.TIMEOUT_MAX or limits.faults < 1:
        raise OptionsError(Message("fix.bad_limit"))
    return limits


def _number(name: str, said: str | float, kind: Callable[[Any], _Number]) -> _Number:
    try:
        return kind(said)
    except ValueError:
        raise OptionsError(Message("fix.no_number", {"name": f"--{name}", "said": said})) from None
