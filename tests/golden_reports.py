"""Programs that run watched in this process, and their reports held against golden files.

``GRADSAN_UPDATE_REPORTS=1`` writes the files anew.
"""

from __future__ import annotations

import functools
import os
import runpy
import threading
import warnings
from dataclasses import replace
from pathlib import Path

import torch

import gradsan
from forked import call_forked
from gradsan.model import Report, Seen
from gradsan.present import render_terminal
from gradsan.record.recorder import recorder


@functools.cache
def run_watched(program: Path) -> tuple[Report, tuple[type[BaseException], ...]]:
    """The report of a program, and the exceptions that ended it."""
    # The threads of a process group may outlive the program and then hold up the garbage collector for ever.
    makes_group = '"gloo"' in program.read_text(encoding="utf-8")
    return call_forked(watched_here, program) if makes_group else watched_here(program)


def watched_here(program: Path, mode: str = "watch") -> tuple[Report, tuple[type[BaseException], ...]]:
    """Run a program in a thread of its own: what calls it is no code of the user's, as under ``gradsan run``."""
    # Threads and storages get the numbers of earlier ones again; in one program that is rare, here it is the rule.
    recorder().core.clear()
    recorder().guard.blind_spots.clear()
    watch = gradsan.watch(mode)
    failures: list[type[BaseException]] = []
    always = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    thread = threading.Thread(target=watch(runpy.run_path), args=(str(program),))
    shown, threading.excepthook = threading.excepthook, lambda failed: failures.append(failed.exc_type)
    try:
        with warnings.catch_warnings():
            # gradsan explains some of what is only warned of, and a warning is told once in a process.
            warnings.simplefilter("always")
            warnings.showwarning = lambda *_, **__: None
            thread.start()
            thread.join()
    finally:
        threading.excepthook = shown
        torch.set_warn_always(always)
    return watch.report, tuple(failures)


def assert_golden(program: Path, folder: Path, language: str) -> None:
    """Hold the terminal's report of a program against its file in ``folder``."""
    # How much was watched beside it is the business of other tests.
    bare = replace(run_watched(program)[0], seen=Seen())
    text = render_terminal(bare, language=language, color=False, width=100, stacks=False, cwd=program.parent)
    golden = folder / f"{program.stem}.{language}.txt"
    if os.environ.get("GRADSAN_UPDATE_REPORTS"):
        golden.write_text(text, encoding="utf-8")
    assert text == golden.read_text(encoding="utf-8")
