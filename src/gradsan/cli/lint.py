"""``gradsan lint``: faults of autograd in source files, one line each, without running anything."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gradsan.cli._parser import Subparsers, Words
from gradsan.launch.outcome import Suppressions
from gradsan.launch.reporting import ReportFile
from gradsan.launch.sentences import complain, write_to_stdout
from gradsan.lint._findings import diagnosis_of, report_of
from gradsan.lint.check import Checked
from gradsan.lint.running import Cache, default_folder, lint_files, mended, python_files
from gradsan.model import Diagnosis, Message, Report
from gradsan.options import Options, OptionsError, read_options
from gradsan.present import RENDERERS, working_directory
from gradsan.present.note import render_concise
from gradsan.text import Language, choose_language, language_on, say

_FORMS = ("text", "json", "sarif", "github")


def add_parser(subparsers: Subparsers, words: Words) -> argparse.ArgumentParser:
    """Add ``lint`` to the commands of ``gradsan``; its ``handler`` is :func:`run`."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "lint", help=words("lint.summary"), description=words("lint.description")
    )
    parser.add_argument("paths", nargs="*", metavar=words("lint.value_paths"), help=words("lint.option_paths"))
    for name in ("maybe", "fix"):
        parser.add_argument(f"--{name}", action="store_true", help=words(f"lint.option_{name}"))
    forms = parser.add_mutually_exclusive_group()
    for name in _FORMS:
        sentence = words(f"lint.option_{name}")
        forms.add_argument(f"--{name}", dest="form", action="store_const", const=name, help=sentence)
    parser.add_argument("-o", "--output", metavar=words("lint.value_file"), help=words("lint.option_output"))
    parser.add_argument("--ignore", metavar=words("lint.value_rules"), help=words("lint.option_ignore"))
    parser.add_argument("--baseline", metavar=words("lint.value_file"), help=words("lint.option_baseline"))
    parser.add_argument("--write-baseline", metavar=words("lint.value_file"), help=words("lint.option_write_baseline"))
    parser.add_argument("--jobs", metavar=words("lint.value_number"), help=words("lint.option_jobs"))
    parser.add_argument("--no-cache", action="store_true", help=words("lint.option_no_cache"))
    parser.add_argument("--lang", choices=("en", "zh", "auto"), default="auto", help=words("lint.option_lang"))
    parser.set_defaults(handler=run, form="text")
    return parser


def run(args: argparse.Namespace) -> int:
    """Lint the paths in ``args``; return 0 if nothing was found, else 1.

    Raises:
        OptionsError: for a missing path, and for rule files that cannot be read or written.
    """
    language = choose_language(args.lang, os.environ)
    if args.output is None:
        language = language_on(sys.stdout, language)
    directory = working_directory(None)
    suppressions = Suppressions(_options(args, directory), directory)
    jobs = _jobs(args.jobs)
    target = None if args.output is None else ReportFile(args.output, directory)
    try:
        files = list(python_files([Path(path) for path in args.paths or ["."]]))
    except FileNotFoundError as missing:
        raise OptionsError(Message("lint.no_path", {"path": missing.args[0]})) from None
    cache = Cache(None if args.no_cache else default_folder(os.environ))
    results = dict(lint_files(files, cache, jobs, maybe=args.maybe))
    cache.close()
    fixed = _fix(results, args.maybe, language) if args.fix else 0
    report, said = suppressions.applied(_report(results, args, language))
    for sentence in said:
        complain(sentence, language)
    read = sum(one.problem is None for one in results.values())
    text = _rendered(report, args.form, read, fixed, language)
    problem = None
    if target is None:
        write_to_stdout(text)
    else:
        problem = target.write(text)
    if problem is not None:
        raise OptionsError(problem)
    return 1 if report.diagnoses else 0


def _options(args: argparse.Namespace, directory: Path | None) -> Options:
    given = {"ignore": args.ignore, "baseline": args.baseline, "write-baseline": args.write_baseline}
    wanted: Mapping[str, Any] = {name: value for name, value in given.items() if value is not None}
    found = read_options(wanted, os.environ, directory)
    # The project's settings for its runs (such as a baseline) do not apply to linting.
    return Options(
        ignore=found.ignore,
        suppressions=found.suppressions,
        baseline=args.baseline,
        write_baseline=args.write_baseline,
    )


def _jobs(word: str | None) -> int | None:
    if word is None:
        return None
    if not word.isdigit() or int(word) < 1:
        raise OptionsError(Message("lint.bad_jobs"))
    return int(word)


def _fix(results: dict[Path, Checked], maybe: bool, language: Language) -> int:
    count = 0
    for file, checked in list(results.items()):
        if not any(one.suggestion is not None and one.suggestion.is_certain for one in checked.findings):
            continue
        try:
            written = mended(file)
        except (OSError, UnicodeDecodeError) as problem:
            complain(Message("lint.not_read", {"path": str(file), "problem": str(problem)}), language)
            continue
        if written:
            count += written
            results.update(lint_files([file], Cache(None), 1, maybe=maybe))
    return count


def _report(results: Mapping[Path, Checked], args: argparse.Namespace, language: Language) -> Report:
    found: list[Diagnosis] = []
    for file, checked in results.items():
        if checked.problem is not None:
            complain(Message("lint.not_read", {"path": str(file), "problem": checked.problem}), language)
        found += [diagnosis_of(one, file) for one in checked.findings if one.is_sure or args.maybe]
    return report_of(found, sys.argv)


def _rendered(report: Report, form: str, files: int, fixed: int, language: Language) -> str:
    if form != "text":
        return RENDERERS[form](report, language=language)
    text = render_concise(report, language=language)
    if fixed:
        text += say(Message("lint.fixed", {"count": fixed}), language) + "\n"
    count, looked_at = len(report.diagnoses), Message("lint.files", {"count": files})
    if not count:
        return text + say(Message("lint.found_nothing", {"files": looked_at}), language) + "\n"
    text += say(Message("lint.found", {"count": count, "files": looked_at}), language) + "\n"
    certain = sum(any(fix.applicability == "automatic" for fix in one.fixes) for one in report.diagnoses)
    if certain:
        text += say(Message("lint.fixable", {"count": certain}), language) + "\n"
    return text
