"""``gradsan run``: run a program as python would, and report the conflicts found in it."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NoReturn

from gradsan._ranks import Board, heading, own_files, rank_of, undisturbed
from gradsan.cli._parser import NO_VALUE
from gradsan.cli._program import Ending, Target, gradsan_path, perform, prepare, take_stage
from gradsan.cli._report_file import ReportFile
from gradsan.cli._reporting import Presentation, own_surroundings, present
from gradsan.cli._sentences import complain
from gradsan.cli._suppressing import Suppressions
from gradsan.cli._torch_import import call_after_torch_import, torch_is_installed
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
    "heal-max-bytes",
)
_SWITCHES = ("stacks", "quiet", "github", "deep", "heal", "autopsy")


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> argparse.ArgumentParser:
    """Add ``run`` to the commands of ``gradsan``; its ``handler`` is :func:`run`."""
    language = choose_language("auto", os.environ)

    def words(key: str) -> str:
        return say(Message(f"cli.{key}"), language)

    parser: argparse.ArgumentParser = subparsers.add_parser(
        "run",
        help=words("run_summary"),
        description=words("run_description"),
        usage="gradsan run [options] (SCRIPT | -m MODULE | -c CODE) [args ...]",
    )
    for name in _OPTIONS_WITH_VALUE:
        metavar = words(f"value_{name.replace('-', '_')}")
        parser.add_argument(f"--{name}", nargs="?", const=NO_VALUE, metavar=metavar, help=_option_help(name, words))
    for name in _SWITCHES:
        parser.add_argument(f"--{name}", action=argparse.BooleanOptionalAction, help=_option_help(name, words))
    parser.set_defaults(handler=run)
    return parser


def program_start(words: Sequence[str]) -> int:
    """Where in ``words``, which follow ``run``, the program begins: at the script, ``-m``, ``-c`` or after ``--``."""
    position = 0
    while position < len(words):
        word = words[position]
        if word in ("-", "--") or word[:1] != "-" or word[:2] in ("-m", "-c"):
            return position
        position += 2 if word.startswith("--") and word[2:] in _OPTIONS_WITH_VALUE else 1
    return len(words)


def run(namespace: argparse.Namespace) -> int:
    """Run the program that ``namespace.program`` names, and report; the exit status.

    Raises:
        OptionsError: for what cannot be understood or done; the program has not run then.
        KeyboardInterrupt: where the program ended by it.
    """
    directory = _working_directory()
    options = read_options(_said(namespace), os.environ, directory)
    target = target_of(namespace.program)
    return execute(target, options, directory, partial(_open_session, options))


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


def _open_session(options: Options) -> Session:
    if options.autopsy:
        from gradsan._autopsy import AutopsySession

        return AutopsySession()
    from gradsan._session import Session as WatchSession

    mode: Literal["watch", "deep", "heal"] = "heal" if options.heal else "deep" if options.deep else "watch"
    session: Session = WatchSession(mode=mode, heal_max_bytes=options.heal_max_bytes)
    return session


def _said(namespace: argparse.Namespace) -> dict[str, Any]:
    said: dict[str, Any] = {}
    for name in (*_OPTIONS_WITH_VALUE, *_SWITCHES):
        value = getattr(namespace, name.replace("-", "_"))
        if value is NO_VALUE:
            raise OptionsError(Message("cli.missing_value", {"name": f"--{name}"}))
        if value is not None:
            said[name] = value
    return said


def target_of(words: Sequence[str]) -> Target:
    """The program that the words after the options name. Raises OptionsError where they name none."""
    rest = list(words[1:] if words[:1] == ["--"] else words)
    if not rest:
        raise OptionsError(Message("cli.no_program"))
    kind = {"-m": "module", "-c": "code"}.get(rest[0][:2])
    if kind is None:
        return Target("script", rest[0], tuple(rest[1:]))
    glued = rest.pop(0)[2:]
    if not glued and not rest:
        raise OptionsError(Message("cli.missing_value", {"name": "-m" if kind == "module" else "-c"}))
    name = glued or rest.pop(0)
    return Target("module" if kind == "module" else "code", name, tuple(rest))


def _option_help(name: str, words: Callable[[str], str]) -> str:
    return words(f"option_{name.replace('-', '_')}").replace("%", "%%")


def _working_directory() -> Path | None:
    try:
        return Path.cwd()
    except OSError:
        return None
