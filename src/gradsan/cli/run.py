"""``gradsan run``: run a program as python would, and report the conflicts found in it."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn

import gradsan_start
from gradsan._imports import call_after_torch_import, torch_is_installed
from gradsan.cli import _parser
from gradsan.cli._parser import Subparsers, Words
from gradsan.launch.outcome import Publisher, Suppressions, watch_session
from gradsan.launch.processes import Job, open_job
from gradsan.launch.program import Target, gradsan_path, perform, prepare, take_stage
from gradsan.launch.starts import Starts
from gradsan.launch.uncaught import (
    call_in_multiprocessing,
    call_when_uncaught,
    clean_tracebacks_of_threads,
    run_exit_handlers,
    wait_for_threads,
)
from gradsan.launch.watched_process import Member
from gradsan.launch.watcher import Session, Watcher
from gradsan.model import Message, Program
from gradsan.options import SWITCHES, WITH_VALUE, Options, OptionsError, read_options, working_directory


def add_parser(subparsers: Subparsers, words: Words) -> argparse.ArgumentParser:
    """Add ``run`` to the commands of ``gradsan``; its ``handler`` is :func:`run`."""
    parser = _parser.add_program_parser(subparsers, "run", words, "cli.run_")
    _parser.add_options_with_value(parser, WITH_VALUE, words)
    for name in SWITCHES:
        sentence = words(f"cli.option_{name.replace('-', '_')}")
        parser.add_argument(f"--{name}", action=argparse.BooleanOptionalAction, help=sentence)
    parser.set_defaults(handler=run)
    return parser


def program_start(words: Sequence[str]) -> int:
    """Return the index in ``words``, which follow ``run``, of the program: the script, ``-m``, ``-c`` or ``--``."""
    return _parser.program_start(words, WITH_VALUE)


def run(namespace: argparse.Namespace) -> int:
    """Run the program that ``namespace.program`` names, and report; return the exit status.

    Raises:
        OptionsError: for invalid options; the program has not run then.
        KeyboardInterrupt: if it ended the program.
    """
    directory = working_directory()
    options = read_options(_parser.said(namespace, (*WITH_VALUE, *SWITCHES)), os.environ, directory)
    target = _parser.target_of(namespace.program)
    return execute(target, options, directory, partial(_open_session, options, directory))


def execute(target: Target, options: Options, directory: Path | None, open_session: Callable[[], Session]) -> int:
    """Run ``target``, watched by a session from ``open_session``, made once the program has imported torch.

    ``directory`` is the working directory, None where it has been deleted. Returns the exit status and raises as
    :func:`run` does.
    """
    own_path = gradsan_path()
    launch = prepare(target)
    publisher = Publisher(options, directory, own_path=own_path, target=target)
    main = take_stage(launch)
    if not torch_is_installed():
        raise OptionsError(Message("cli.no_torch"))

    watcher = Watcher(open_session)
    argv = tuple(sys.argv)
    # Another gradsan may have started this process: the user's options here override it.
    gradsan_start.leave()
    job = None if options.autopsy else open_job(options, directory, watcher.unseen)

    def leaves(status: int) -> int:
        ended = Program(argv, "failed" if status else "finished", ("os._exit", str(status)) if status else None)
        report = publisher.publish(watcher, ended, job, is_child=member.is_child, flushes=False)
        if member.is_child:
            return status
        _close(job)
        return status if report is None else publisher.status(report, status)

    folder = None if job is None else job.folder
    member = Member(watcher, folder, language=publisher.language, write=publisher.write_unfinished, leaves=leaves)
    watcher.on_finding = member.found
    starts = Starts(str(folder)) if folder is not None else None
    call_after_torch_import(partial(_begin, watcher, member, starts))
    call_when_uncaught(watcher.examine)
    clean_tracebacks_of_threads()
    member.watch(starts)
    ending = perform(launch, main)
    was_terminated = False
    if ending.exception is None:
        # Threads and children may still be training. After a failure nobody should have to wait for the report.
        was_terminated = wait_for_threads()
        if not was_terminated:
            run_exit_handlers()

    failed = ("SIGTERM", "") if was_terminated else ending.exception
    program = Program(argv, "finished" if failed is None else "failed", failed)
    report = None
    try:
        if not (member.is_child and member.end(program)):
            member.over()
            report = publisher.publish(watcher, program, job, is_child=member.is_child, flushes=not was_terminated)
        if not member.is_child:
            _close(job)
    except KeyboardInterrupt as interrupt:
        _die_of(interrupt)
    if was_terminated:
        signal.raise_signal(signal.SIGTERM)
    if ending.interrupt is not None:
        _die_of(ending.interrupt)
    if watcher.was_halted:
        return options.exit_code or ending.status
    return ending.status if report is None or member.is_child else publisher.status(report, ending.status)


def _begin(watcher: Watcher, member: Member, starts: Starts | None) -> None:
    watcher.start()
    if starts is not None:
        starts.follow()
    member.undo.append(call_in_multiprocessing(watcher.examine))


def _close(job: Job | None) -> None:
    if job is not None:
        job.close()


def _die_of(interrupt: KeyboardInterrupt) -> NoReturn:
    # The interpreter ends the process by SIGINT after its cleanup; the exception has been shown already.
    sys.excepthook = lambda *_: None
    raise interrupt


def _open_session(options: Options, directory: Path | None) -> Session:
    if options.autopsy:
        from gradsan._autopsy import AutopsySession

        return AutopsySession()
    return watch_session(options, Suppressions(options, directory))
