"""Each program of ``life/`` meets the end of a graph, or a fault that PyTorch only warns of or does not report.

Its report is held against golden files; ``GRADSAN_UPDATE_REPORTS=1 pytest tests/failures`` writes them anew.
"""

import functools
import os
import runpy
import threading
import warnings
from pathlib import Path

import pytest
import torch

import gradsan
from gradsan.capture.recorder import recorder
from gradsan.present import render_terminal
from gradsan.text import LANGUAGES

HERE = Path(__file__).parent
PROGRAMS = sorted((HERE / "life").glob("*.py"))


@functools.cache
def watched(program):
    """The report of one program, run in a thread of its own: what calls it is no user code, as under gradsan run."""
    # Threads that follow one another share an identity, and number their Nodes alike.
    recorder().core.clear()
    watch = gradsan.watch()
    thread = threading.Thread(target=watch(runpy.run_path), args=(str(program),))
    shown, threading.excepthook = threading.excepthook, lambda _: None
    always = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = lambda *_, **__: None
            thread.start()
            thread.join()
    finally:
        threading.excepthook = shown
        torch.set_warn_always(always)
    return watch.report


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_report(program, language, monkeypatch):
    monkeypatch.setenv("GRADSAN_TEXT", "strict")
    monkeypatch.setenv("GRADSAN_DEBUG", "1")
    report = watched(program)
    text = render_terminal(report, language=language, color=False, width=100, stacks=False, cwd=program.parent)
    text = text.rstrip().rpartition("\n")[0]  # how many events there were is not what these programs are about
    golden = HERE / "life_reports" / f"{program.stem}.{language}.txt"
    if os.environ.get("GRADSAN_UPDATE_REPORTS"):
        golden.write_text(text, encoding="utf-8")
    assert text == golden.read_text(encoding="utf-8")


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_every_label_is_at_a_line_of_the_program(program):
    report = watched(program)
    assert report.seen.blind_spots == ()
    assert report.diagnoses
    lines = len(program.read_text().splitlines())
    for diagnosis in report.diagnoses:
        assert diagnosis.labels
        assert all(Path(label.frame.file) == program and label.frame.line <= lines for label in diagnosis.labels)


CODES = {
    "checkpoint_input_plain": "GS517",
    "cut_": "GS405",
    "custom_backward_": "GS410",
    "dirty_not_input": "GS307",
    "graph_": "GS422",
    "leaf_": "GS420",
    "parameter_": "GS421",
    "second_backward_built_once": "GS403",
    "second_backward_same_loss": "GS404",
    "second_backward_shared_": "GS402",
    "second_backward_state_carried": "GS401",
}


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_the_code_is_that_of_the_family(program):
    expected = {code for prefix, code in CODES.items() if program.stem.startswith(prefix)}
    assert expected <= {diagnosis.code for diagnosis in watched(program).diagnoses}


CUT_AT = {
    "cut_by_argmax": "logits.argmax",
    "cut_by_comparison": "out[:, 0] > out[:, 1]",
    "cut_by_decorator": "@torch.no_grad()",
    "cut_by_item": ".item()",
    "cut_by_mode": "set_grad_enabled(False)",
    "cut_by_numpy": "a.detach().numpy()",
    "cut_in_eval_helper": "with torch.no_grad():",
    "cut_set_late": "w.requires_grad_()",
}


@pytest.mark.parametrize("name", CUT_AT)
def test_the_first_cut_is_found(name):
    program = HERE / "life" / f"{name}.py"
    (diagnosis,) = watched(program).diagnoses
    (line,) = [label.frame.line for label in diagnosis.labels if label.role == "created"]
    assert CUT_AT[name] in program.read_text().splitlines()[line - 1]
