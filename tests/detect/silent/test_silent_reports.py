"""Each program of ``programs/`` runs to its end with a wrong gradient; its report is held against golden files.

``GRADSAN_UPDATE_REPORTS=1 pytest tests/detect/silent`` writes them anew.
"""

from pathlib import Path

from cases import each
from golden_reports import assert_golden, run_watched
from gradsan.text import LANGUAGES

HERE = Path(__file__).parent
PROGRAMS = sorted((HERE / "programs").glob("*.py"))
CODES = {
    "parameter_": "GS421",
    "function_": "GS212",
    "gradient_overwritten_": "GS213",
    "gradient_kept_": "GS214",
    "gradient_opposed_": "GS214",
    "outside_": "GS203",
    "value_": "GS215",
    "argument_": "GS216",
    "name_": "GS216",
    "update_": "GS218",
    "hook_": "GS223",
    "constant_": "GS220",
    "term_": "GS221",
    "data_": "GS222",
    "loss_": "GS215",
    "layer_": "GS216",
    "unowned_": "GS423",
    "spent_": "GS424",
    "clip_": "GS425",
    "schedule_": "GS426",
    "once_": "GS403",
}
"""The code by the beginning of a program's name."""


@each("language", LANGUAGES)
@each("program", PROGRAMS, ids=lambda path: path.stem)
def test_report(program, language):
    assert_golden(program, HERE / "reports", language)


@each("program", PROGRAMS, ids=lambda path: path.stem)
def test_one_silent_diagnosis_at_lines_of_the_program(program):
    report, failures = run_watched(program)
    assert not failures
    assert report.seen.blind_spots == ()
    (diagnosis,) = report.diagnoses
    assert diagnosis.silent
    assert diagnosis.code in {code for prefix, code in CODES.items() if program.stem.startswith(prefix)}
    assert diagnosis.labels
    lines = len(program.read_text().splitlines())
    assert all(Path(label.frame.file) == program and label.frame.line <= lines for label in diagnosis.labels)
