"""Each program of ``programs/`` runs to its end with a wrong gradient; its report is held against golden files.

``GRADSAN_UPDATE_REPORTS=1 pytest tests/silent`` writes them anew.
"""

import functools
import os
import runpy
import threading
from dataclasses import replace
from pathlib import Path

import pytest

import gradsan
from gradsan.capture.recorder import recorder
from gradsan.model import Seen
from gradsan.present import render_terminal
from gradsan.text import LANGUAGES

HERE = Path(__file__).parent
PROGRAMS = sorted((HERE / "programs").glob("*.py"))
CODES = {
    "parameter_": "GS421",
    "gradient_overwritten_": "GS213",
    "gradient_kept_": "GS214",
    "value_": "GS215",
    "argument_": "GS216",
}
"""The code by the beginning of a program's name."""


@functools.cache
def watched(program):
    """The report of one program, run in a thread of its own: what calls it is no user code, as under gradsan run."""
    # Threads and storages get the numbers of earlier ones again; in one program that is rare, here it is the rule.
    recorder().core.clear()
    watch = gradsan.watch()
    failures = []
    thread = threading.Thread(target=watch(runpy.run_path), args=(str(program),))
    shown, threading.excepthook = threading.excepthook, failures.append
    try:
        thread.start()
        thread.join()
    finally:
        threading.excepthook = shown
    assert not failures
    return watch.report


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_report(program, language, monkeypatch):
    # How much was watched beside it is the business of other tests.
    report = replace(watched(program), seen=Seen())
    text = render_terminal(report, language=language, color=False, width=100, stacks=False, cwd=program.parent)
    golden = HERE / "reports" / f"{program.stem}.{language}.txt"
    if os.environ.get("GRADSAN_UPDATE_REPORTS"):
        golden.write_text(text, encoding="utf-8")
    assert text == golden.read_text(encoding="utf-8")


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_one_silent_diagnosis_at_lines_of_the_program(program):
    report = watched(program)
    assert report.seen.blind_spots == ()
    (diagnosis,) = report.diagnoses
    assert diagnosis.silent
    assert diagnosis.code in {code for prefix, code in CODES.items() if program.stem.startswith(prefix)}
    assert diagnosis.labels
    lines = len(program.read_text().splitlines())
    assert all(Path(label.frame.file) == program and label.frame.line <= lines for label in diagnosis.labels)
