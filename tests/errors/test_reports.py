"""Each program of ``programs/`` raises a message of the catalogue; its report is held against golden files.

``GRADSAN_UPDATE_REPORTS=1 pytest tests/errors`` writes them anew.
"""

import contextlib
import gc
import pickle
import weakref
from pathlib import Path

import pytest
import torch

import gradsan
from cases import each
from golden_reports import assert_golden, run_watched, watched_here
from gradsan.text import LANGUAGES, codes

HERE = Path(__file__).parent
PROGRAMS = sorted((HERE / "programs").glob("*.py"))


@each("language", LANGUAGES)
@each("program", PROGRAMS, ids=lambda path: path.stem)
def test_report(program, language):
    assert_golden(program, HERE / "reports", language)


@each("program", PROGRAMS, ids=lambda path: path.stem)
def test_one_diagnosis_with_a_page_at_lines_of_the_program(program):
    report, _ = run_watched(program)
    assert report.seen.blind_spots == ()
    (diagnosis,) = report.diagnoses
    assert diagnosis.code in {entry.code for entry in codes()}
    assert diagnosis.labels
    lines = len(program.read_text().splitlines())
    assert all(Path(label.frame.file) == program and label.frame.line <= lines for label in diagnosis.labels)


def test_deep_mode_shows_what_a_compiled_function_overwrites():
    report, _ = watched_here(HERE / "programs" / "compiled_result_overwritten.py", "deep")
    (diagnosis,) = report.diagnoses
    found = [(label.role, label.frame.line) for label in diagnosis.labels]
    assert found == [("saved", 6), ("written", 7), ("used", 11)]


def test_a_watched_block_keeps_no_tensor_alive():
    kept = []
    with gradsan.watch() as watch:
        notes = fail_in_block(kept)
    gc.collect()
    assert kept[0]() is None
    assert "GS301" in notes
    assert [diagnosis.code for diagnosis in watch.diagnoses] == ["GS301"]


def fail_in_block(kept):
    """The notes of an error that a leaf written in place raises; ``kept`` receives a weak reference to the leaf."""
    try:
        with gradsan.watch():
            w = torch.ones(3, requires_grad=True)
            kept.append(weakref.ref(w))
            w += 1
    except RuntimeError as error:
        return "".join(getattr(error, "__notes__", [str(error)]))


def test_an_error_that_the_program_wraps_is_found_and_can_be_sent_to_another_process():
    def train():
        try:
            torch.ones(3, requires_grad=True).add_(1)
        except RuntimeError as error:
            raise ValueError("training failed") from error

    with pytest.raises(ValueError, match="training failed") as caught, gradsan.watch() as watch:
        train()
    assert [diagnosis.code for diagnosis in watch.diagnoses] == ["GS301"]
    assert str(pickle.loads(pickle.dumps(caught.value))) == "training failed"


def test_an_error_that_the_program_catches_is_its_own_affair():
    with gradsan.watch() as watch, contextlib.suppress(RuntimeError):
        torch.ones(3, requires_grad=True).add_(1)
    assert watch.diagnoses == ()
