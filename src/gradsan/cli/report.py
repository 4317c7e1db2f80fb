"""``gradsan report``: reports read from JSON files, merged, and shown in another form."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from gradsan._editors import address_in, checked_editor
from gradsan.cli._parser import Subparsers, Words
from gradsan.launch.processes import left_reports, reports_folder
from gradsan.launch.reporting import ReportFile, wants_color, width_of
from gradsan.launch.sentences import complain, write_to_stdout
from gradsan.model import Message
from gradsan.options import OptionsError
from gradsan.present import RENDERERS, needs_ascii, render_html, render_terminal, working_directory
from gradsan.present.json import ReadError, Recorded, read_report
from gradsan.present.merge import merged
from gradsan.source.tree import recorded_lines
from gradsan.text import Language, choose_language, language_on

_WRONG_USAGE = 2
_FORMATS = ("text", *sorted(RENDERERS))


def add_parser(subparsers: Subparsers, words: Words) -> argparse.ArgumentParser:
    """Add ``report`` to the commands of ``gradsan``; its ``handler`` is :func:`run`."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "report", help=words("report.summary"), description=words("report.summary")
    )
    parser.add_argument("files", nargs="*", metavar=words("report.value_files"), help=words("report.files"))
    forms = parser.add_mutually_exclusive_group()
    for name in _FORMATS:
        sentence = words(f"report.format_{name}")
        forms.add_argument(f"--{name}", dest="form", action="store_const", const=name, help=sentence)
    parser.add_argument("-o", "--output", metavar=words("report.value_files"), help=words("report.output"))
    parser.add_argument("--lang", choices=("en", "zh", "auto"), default="auto", help=words("report.lang"))
    parser.add_argument("--color", choices=("auto", "always", "never"), default="auto", help=words("report.color"))
    parser.add_argument("--editor", default="auto", metavar=words("report.value_editor"), help=words("report.editor"))
    parser.add_argument("--stacks", action="store_true", help=words("report.stacks"))
    parser.set_defaults(handler=run, form="text")
    return parser


def run(args: argparse.Namespace) -> int:
    """Show the reports that ``args`` names; return 0, or 2 if a file cannot be read or written.

    Raises:
        OptionsError: if the output file cannot be written, or no file is named and none is there.
    """
    try:
        checked_editor(args.editor)
    except ValueError:
        raise OptionsError(Message("report.no_editor", {"value": args.editor})) from None
    language = choose_language(args.lang, os.environ)
    if args.output is None:
        language = language_on(sys.stdout, language)
    target = None if args.output is None else ReportFile(args.output, working_directory(None))
    files = args.files or [str(file) for file in left_reports()]
    if not files:
        raise OptionsError(Message("report.none_left", {"path": reports_folder()}))
    if not args.files:
        complain(Message("report.left", {"paths": " ".join(files)}), language)
    try:
        recorded = {name: read_report(Path(name)) for name in dict.fromkeys(files)}
    except ReadError as problem:
        complain(problem.message, language)
        return _WRONG_USAGE
    text = _rendered(recorded, args, language)
    if target is None:
        write_to_stdout(text)
        return 0
    problem_of_file = target.write(text)
    if problem_of_file is not None:
        complain(problem_of_file, language)
        return _WRONG_USAGE
    return 0


def _rendered(recorded: dict[str, Recorded], args: argparse.Namespace, language: Language) -> str:
    report = merged([(name, one.report) for name, one in recorded.items()])
    # File names in the reports are relative to where the programs ran, and are not made relative again.
    lines = {place: line for one in reversed(recorded.values()) for place, line in one.lines.items()}
    with recorded_lines(lines):
        if args.form == "html":
            editor = address_in(args.editor, os.environ)
            return render_html(report, language=language, cwd=working_directory(None), editor=editor)
        if args.form != "text":
            return RENDERERS[args.form](report, language=language)
        stream = sys.stdout if args.output is None else None
        return render_terminal(
            report,
            language=language,
            color=wants_color(args.color, stream, os.environ),
            width=width_of(stream),
            stacks=args.stacks,
            ascii=stream is not None and needs_ascii(stream.encoding),
        )
