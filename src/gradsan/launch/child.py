"""Child process: a Python started by a watched program, watched like its parent, reporting to it."""

from __future__ import annotations

import atexit
import os
import sys
from functools import partial
from pathlib import Path

from gradsan._imports import call_after_torch_import
from gradsan.launch.outcome import Suppressions, watch_session
from gradsan.launch.processes import read_options
from gradsan.launch.starts import Starts
from gradsan.launch.uncaught import call_before_shown
from gradsan.launch.watched_process import Member
from gradsan.launch.watcher import Watcher
from gradsan.model import Program
from gradsan.options import Options, working_directory
from gradsan.text import choose_language
from gradsan_start import log


def begin_child(folder: str) -> None:
    """Watch this process from its import of torch on, as a part of the run in ``folder``.

    Raises:
        OSError, ValueError, TypeError, KeyError: if the folder is invalid.
    """
    options = read_options(Path(folder))
    if options is None:
        log(folder, "failed")
        return
    directory = working_directory()
    watcher = Watcher(lambda: watch_session(options, Suppressions(options, directory)))
    language = choose_language(options.lang, os.environ)

    def leaves(status: int) -> int:
        _publish_alone(watcher, options, status, flushes=False)
        return status

    member = Member(watcher, Path(folder), language=language, leaves=leaves, is_child=True)
    watcher.on_finding = member.found
    call_after_torch_import(partial(_start, watcher, member, options, folder))


def _start(watcher: Watcher, member: Member, options: Options, folder: str) -> None:
    watcher.start()
    if watcher.problems:
        log(folder, "failed")
        return
    log(folder, "watched", name=member.name())
    member.watch(Starts(folder))
    member.undo.append(call_before_shown(watcher.examine))
    atexit.register(_end, watcher, member, options)


def _end(watcher: Watcher, member: Member, options: Options) -> None:
    if not member.end():
        _publish_alone(watcher, options, 0)


def _publish_alone(watcher: Watcher, options: Options, status: int, flushes: bool = True) -> None:
    """Report on stderr: the run that this process belonged to has ended before it."""
    from gradsan.launch.outcome import Publisher

    program = Program(tuple(sys.argv), "failed" if status else "finished")
    publisher = Publisher(options, working_directory())
    publisher.publish(watcher, program, None, is_child=True, flushes=flushes)
