"""``gradsan fix``: run a program, try candidate fixes, and show, keep or apply those that help (``--apply``)."""

from __future__ import annotations

import argparse
import os
import platform
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, TypeVar

from gradsan import __version__
from gradsan._imports import torch_is_installed
from gradsan.cli import _parser
from gradsan.cli._parser import Subparsers, Words
from gradsan.launch.program import Target, prepare
from gradsan.launch.reporting import ReportFile, wants_color, width_of
from gradsan.launch.sentences import complain, write_to_stderr
from gradsan.model import Fix, Message, Program, Report
from gradsan.options import Options, OptionsError, read_options
from gradsan.present import needs_ascii, render_json, render_terminal, working_directory
from gradsan.present._places import shown_path
from gradsan.repair import Patch, apply_patch, dirty_files, is_implied
from gradsan.text import Language, choose_language, language_on, say

if TYPE_CHECKING:
    from gradsan.repair import Found, Limits


_OUTPUT_SHOWN = 4000
"""The number of characters of the program's output that are shown if nothing else explains its end."""


def report_of(found: Found, target: Target) -> Report:
    """Return the report of the program, with the fixes of all its faults, and the limits of the trials."""
    argv = (target.name if target.kind == "script" else f"-{target.kind[0]}", *target.arguments)
    outcome = "finished" if found.exception is None else "failed"
    return Report(
        program=Program(argv, "failed" if outcome == "failed" else "finished", found.exception),
        seen=replace(found.seen, blind_spots=(*found.seen.blind_spots, *found.problems)),
        diagnoses=found.diagnoses,
        gradsan=__version__,
        torch=_torch_version(),
        python=platform.python_version(),
    )


def show(report: Report, options: Options, language: Language) -> None:
    """Print the report on stderr."""
    stream = sys.stderr
    text = render_terminal(
        report,
        language=language,
        color=wants_color(options.color, stream, os.environ),
        width=width_of(stream),
        stacks=options.stacks,
        cwd=working_directory(None),
        ascii=needs_ascii(getattr(stream, "encoding", None)),
    )
    write_to_stderr(text)


def series(found: Found) -> list[Message]:
    """Return sentences for several faults: the fix of each, in order, and whether one is left."""
    if len(found.diagnoses) < 2:
        return []
    total = len(found.diagnoses)
    said: list[Message] = []
    for number, (fault, fix) in enumerate(zip(found.diagnoses, found.chosen, strict=False), 1):
        values = {"number": number, "total": total, "code": fault.code, "title": fault.title, "fix": fix.summary}
        said.append(Message("fix.series_step", values))
    if len(found.chosen) < total:
        fault = found.diagnoses[-1]
        values = {"number": total, "total": total, "code": fault.code, "title": fault.title}
        said.append(Message("fix.series_end", values))
    return said


def say_nothing_found(found: Found, language: Language) -> int:
    """Print why there is nothing to show; return the exit status."""
    if found.is_incomplete:
        write_to_stderr(found.output[-_OUTPUT_SHOWN:])
        for problem in found.problems:
            complain(problem, language)
        return 1
    if found.exception is None:
        # What it starts was let through, and not looked at.
        nothing = Message("fix.nothing_in_process" if found.lets_through else "fix.nothing_to_do")
        for sentence in found.problems or (nothing,):
            complain(sentence, language)
        return 0
    write_to_stderr(found.output[-_OUTPUT_SHOWN:])
    complain(Message("fix.not_explained", {"kind": found.exception[0]}), language)
    return 1


def _torch_version() -> str | None:
    try:
        return version("torch")
    except PackageNotFoundError:
        return None


_SHARED = ("json", "lang", "color")
_OWN = ("patch", "steps", "timeout", "faults")
_FILES = ("json", "patch")
_SWITCHES = ("include", "yes")
_BEST = "best"

_Number = TypeVar("_Number", int, float)


def add_parser(subparsers: Subparsers, words: Words) -> argparse.ArgumentParser:
    """Add ``fix`` to the commands of ``gradsan``; its ``handler`` is :func:`run`."""
    parser = _parser.add_program_parser(subparsers, "fix", words, "fix.")
    parser.add_argument("--apply", nargs="?", const=_BEST, metavar="N", help=words("fix.option_apply"))
    _parser.add_options_with_value(parser, _OWN, words, "fix")
    for name in _SWITCHES:
        parser.add_argument(f"--{name}", action="store_true", help=words(f"fix.option_{name}"))
    _parser.add_options_with_value(parser, _SHARED, words)
    parser.set_defaults(handler=run)
    return parser


def program_start(words: Sequence[str]) -> int:
    """Return the index in ``words``, which follow ``fix``, at which the program begins."""
    return _parser.program_start(words, (*_SHARED, *_OWN), with_number=("apply",))


def run(namespace: argparse.Namespace) -> int:
    """Find fixes for the program that ``namespace.program`` names; return 0 if no fault is left, else 1.

    Raises:
        OptionsError: for invalid options.
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
    # Only files named here: a file that `run` always writes is not this report's.
    files = {name: ReportFile(path, directory) for name, path in {**own, **shared}.items() if name in _FILES}
    if not torch_is_installed():
        raise OptionsError(Message("cli.no_torch"))
    return _Fixing(target, limits, options, language, files).run(
        number, applies=wanted is not None, asks=not namespace.yes
    )


@dataclass(frozen=True, slots=True)
class _Fixing:
    """The parsed request of one ``gradsan fix``."""

    target: Target
    limits: Limits
    options: Options
    language: Language
    files: Mapping[str, ReportFile]

    def run(self, number: int | None, *, applies: bool, asks: bool) -> int:
        """Search, show, keep and apply fix ``number`` (None: the best); return the exit status."""
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
        from gradsan.repair import runs_well

        def is_well() -> bool:
            return runs_well(
                self._asked(),
                self.limits,
                lets_through=found.lets_through,
                ends_by=found.left,
                remaining=found.remaining,
            )

        mended = found.diagnoses[len(found.chosen) - 1]
        best = next(fix for fix in mended.fixes if fix.verification.status == "passed")
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


class _StillFailsError(Exception):
    """The program, run again from disk, has a fault."""


def is_wanted(fix: Fix, number: int | None, *, asks: bool, language: Language) -> bool:
    """Whether ``fix`` may be written: requested by its ``number``, or the best one (None), if it keeps the training.

    A best fix that does not is written after a question on a terminal; without questions (``asks`` False) only if its
    change is the one that the cause implies.
    """
    if number is not None or fix.verification.training == "same":
        return True
    if not asks and (fix.meaning == "preserved" or is_implied(fix)):
        return True
    how = "?" if fix.how_changed is None else say(fix.how_changed, language)
    is_known = fix.verification.training is not None
    if asks and _is_answered(Message("fix.ask_changed" if is_known else "fix.ask_unknown", {"how": how}), language):
        return True
    complain(Message("fix.not_the_same" if is_known else "fix.not_known_same", {"how": how, "number": 1}), language)
    return False


def apply_fix(
    patches: Sequence[Patch], number: int, is_well: Callable[[], bool], *, asks: bool, language: Language
) -> bool:
    """Write patch ``number`` (from 1); return whether it stays. ``is_well`` runs the program from disk with it.

    If ``asks`` is true, files with uncommitted changes are only written with the user's consent.

    Raises:
        OptionsError: if there is no such patch, or a file cannot be written; none has changed then.
    """
    if not 1 <= number <= len(patches):
        raise OptionsError(Message("fix.no_such_fix", {"number": number, "count": len(patches)}))
    patch = patches[number - 1]
    dirty = dirty_files(patch) if asks else ()
    if dirty and not _agreed(dirty, language):
        complain(Message("fix.left_alone"), language)
        return False
    complain(Message("fix.running_applied"), language)
    try:
        with apply_patch(patch):
            if not is_well():
                raise _StillFailsError
    except _StillFailsError:
        complain(Message("fix.restored"), language)
        return False
    except OSError as failure:
        raise OptionsError(Message("fix.cannot_write", {"reason": failure.strerror or str(failure)})) from None
    complain(Message("fix.applied", {"files": _shown(patch.files)}), language)
    return True


def is_agreed(what: Message, language: Language) -> bool:
    """Whether the user at the terminal agrees to every trial doing ``what`` cannot be kept in a scratch layer."""
    return bool(_is_answered(Message("fix.ask_uncovered", {"what": say(what, language)}), language))


def _shown(files: Iterable[str]) -> str:
    return ", ".join(shown_path(file, working_directory(None)) for file in sorted(files))


def _agreed(dirty: tuple[str, ...], language: Language) -> bool:
    question = Message("fix.ask_dirty", {"files": _shown(dirty)})
    is_agreed = _is_answered(question, language)
    if is_agreed is None:
        write_to_stderr(f"{say(question, language)}\n")
    return bool(is_agreed)


def _is_answered(question: Message, language: Language) -> bool | None:
    """Whether the user at the terminal answers yes; None if there is no terminal."""
    if not sys.stdin or not sys.stdin.isatty():
        return None
    write_to_stderr(say(question, language))
    return sys.stdin.readline().strip().lower() in ("y", "yes")
