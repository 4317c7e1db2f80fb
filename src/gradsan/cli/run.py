"""``gradsan run``: run a program as python would, and report the conflicts found in it."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from gradsan._imports import call_after_torch_import, torch_is_installed
from gradsan._ranks import Board, heading, own_files, rank_of, undisturbed
from gradsan._terms import chosen
from gradsan.cli import _program_words
from gradsan.cli._program import Ending, Target, gradsan_path, perform, prepare, take_stage
from gradsan.cli._report_file import ReportFile
from gradsan.cli._reporting import Presentation, own_surroundings, present
from gradsan.cli._sentences import complain
from gradsan.cli._suppressing import Suppressions
from gradsan.cli._uncaught import call_when_uncaught, clean_tracebacks_of_threads, wait_for_threads
from gradsan.cli._watcher import Session, Watcher
from gradsan.model import Message, Program, Report
from gradsan.options import REPORT_FILES, Options, OptionsError, read_options
from gradsan.text import choose_language, say

_OPTIONS_WITH_VALUE = (
    "json",
    "html",
    "sarif",
    "lang",
    "color",
    "exit-code",
    "ignore",
    "suppressions",
    "baseline",
    "write-baseline",
    "heal-only",
    "max-bytes",
)
_SWITCHES = ("stacks", "quiet", "github", "deep", "heal", "halt", "early", "strict", "autopsy")


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> argparse.ArgumentParser:
    """Add ``run`` to the commands of ``gradsan``; its ``handler`` is :func:`run`."""
    language = choose_language("auto", os.environ)

    def words(key: str) -> str:
        return say(Message(f"cli.{key}"), language)

    parser = _program_words.add_program_parser(subparsers, "run", words("run_summary"), words("run_description"))
    _program_words.add_options_with_value(parser, _OPTIONS_WITH_VALUE, words)
    for name in _SWITCHES:
        sentence = words(f"option_{name}").replace("%", "%%")
        parser.add_argument(f"--{name}", action=argparse.BooleanOptionalAction, help=sentence)
    parser.set_defaults(handler=run)
    return parser


def program_start(words: Sequence[str]) -> int:
    """Where in ``words``, which follow ``run``, the program begins: at the script, ``-m``, ``-c`` or after ``--``."""
    return _program_words.program_start(words, _OPTIONS_WITH_VALUE)


def run(namespace: argparse.Namespace) -> int:
    """Run the program that ``namespace.program`` names, and report; the exit status.

    Raises:
        OptionsError: for what cannot be understood or done; the program has not run then.
        KeyboardInterrupt: where the program ended by it.
    """
    directory = _working_directory()
    options = read_options(_program_words.said(namespace, (*_OPTIONS_WITH_VALUE, *_SWITCHES)), os.environ, directory)
    target = _program_words.target_of(namespace.program)
    return execute(target, options, directory, partial(_open_session, options, directory))


def execute(target: Target, options: Options, directory: Path | None, open_session: Callable[[], Session]) -> int:
    """Run ``target``, watched by the session that ``open_session`` makes once the program has imported torch.

    ``directory`` is the working directory, None where it has been deleted. Returns the exit status and raises as
    :func:`run` does.
    """
    language = choose_language(options.lang, os.environ)
    own_path = gradsan_path()
    launch = prepare(target)
    rank = rank_of(os.environ)
    asked, options = options, own_files(options, rank, directory)
    named = {form: getattr(options, form) for form in REPORT_FILES}
    files = {form: ReportFile(path, directory) for form, path in named.items() if path is not None}
    suppressions = Suppressions(options, directory)
    main = take_stage(launch)
    if not torch_is_installed():
        raise OptionsError(Message("cli.no_torch"))

    watcher = Watcher(open_session)
    process = os.getpid()
    argv = tuple(sys.argv)
    call_after_torch_import(watcher.start)
    call_when_uncaught(watcher.meet)
    clean_tracebacks_of_threads()
    ending = perform(launch, main)
    if ending.exception is None:
        # Threads may still be training. After a failure nobody should have to wait for the report.
        wait_for_threads()

    is_original = os.getpid() == process
    board = Board(rank, os.environ) if rank is not None and is_original else None
    presentation = Presentation(
        options=options,
        language=language,
        directory=directory,
        # The report of a forked child is its own; the files belong to the process that was started.
        files=files if is_original else {},
    )
    try:
        with undisturbed(rank), own_surroundings(own_path, target.name if target.kind == "code" else None):
            watcher.stop()
            program = Program(argv, "finished" if ending.exception is None else "failed", ending.exception)
            found = watcher.report(program)
            report, said = suppressions.applied(found)
            presentation = replace(
                presentation,
                unexplained=watcher.met_autograd_error and not found.diagnoses,
                told=tuple(watcher.problems),
            )
            if rank is not None and board is not None:
                tell = partial(board.left_to_tell, unexplained=presentation.unexplained)
                presentation = replace(presentation, left_to_tell=tell, heading=heading(rank, asked, options))
            problems = [*watcher.problems, *present(report, presentation)]
            is_silent = options.quiet or (rank is not None and rank.number > 0)
            for sentence in problems if is_silent else [*problems, *said]:
                complain(sentence, language)
    except KeyboardInterrupt as interrupt:
        _die_of(interrupt)
    if ending.interrupt is not None:
        _die_of(ending.interrupt)
    if watcher.was_halted:
        return options.exit_code or ending.status
    return _status(ending, report, options, board) if is_original else ending.status


def _status(ending: Ending, report: Report, options: Options, board: Board | None) -> int:
    if ending.status:
        return ending.status
    is_conflict = any(diagnosis.severity in ("error", "warning") for diagnosis in report.diagnoses)
    if board is not None:
        return board.status(is_conflict, options.exit_code)
    return options.exit_code if is_conflict else 0


def _die_of(interrupt: KeyboardInterrupt) -> NoReturn:
    # The interpreter, seeing it pass, ends the process by SIGINT once it has cleaned up; it has been shown already.
    sys.excepthook = lambda *_: None
    raise interrupt


def _open_session(options: Options, directory: Path | None) -> Session:
    if options.autopsy:
        from gradsan._autopsy import AutopsySession

        return AutopsySession()
    from gradsan._session import Session as WatchSession

    mode, terms = chosen(options, Suppressions(options, directory).wants)
    session: Session = WatchSession(mode, terms=terms)
    return session


def _working_directory() -> Path | None:
    try:
        return Path.cwd()
    except OSError:
        return None
