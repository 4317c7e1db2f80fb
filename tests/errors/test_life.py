"""Each program of ``life/`` meets the end of a graph, or a fault that PyTorch only warns of or does not report.

Its report is held against golden files; ``GRADSAN_UPDATE_REPORTS=1 pytest tests/errors`` writes them anew.
"""

from pathlib import Path

from cases import each
from golden_reports import assert_golden, run_watched
from gradsan.text import LANGUAGES

HERE = Path(__file__).parent
PROGRAMS = sorted((HERE / "life").glob("*.py"))


@each("language", LANGUAGES)
@each("program", PROGRAMS, ids=lambda path: path.stem)
def test_report(program, language):
    assert_golden(program, HERE / "life_reports", language)


@each("program", PROGRAMS, ids=lambda path: path.stem)
def test_every_label_is_at_a_line_of_the_program(program):
    report = run_watched(program)[0]
    assert report.seen.blind_spots == ()
    assert report.diagnoses
    lines = len(program.read_text().splitlines())
    for diagnosis in report.diagnoses:
        assert diagnosis.labels
        assert all(Path(label.frame.file) == program and label.frame.line <= lines for label in diagnosis.labels)


CODES = {
    "checkpoint_form_not_said": "GS518",
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


@each("program", PROGRAMS, ids=lambda path: path.stem)
def test_the_code_is_that_of_the_family(program):
    expected = {code for prefix, code in CODES.items() if program.stem.startswith(prefix)}
    assert expected <= {diagnosis.code for diagnosis in run_watched(program)[0].diagnoses}


CUT_AT = {
    "cut_by_argmax": "logits.argmax",
    "cut_by_comparison": "out[:, 0] > out[:, 1]",
    "cut_by_decorator": "@torch.no_grad()",
    "cut_by_item": ".item()",
    "cut_by_mode": "set_grad_enabled(False)",
    "cut_by_mode_in_helper": "set_grad_enabled(False)",
    "cut_by_numpy": "a.detach().numpy()",
    "cut_in_eval_helper": "with torch.no_grad():",
    "cut_set_late": "w.requires_grad_()",
}


@each("name", CUT_AT)
def test_the_first_cut_is_found(name):
    program = HERE / "life" / f"{name}.py"
    (diagnosis,) = run_watched(program)[0].diagnoses
    (line,) = [label.frame.line for label in diagnosis.labels if label.role == "created"]
    assert CUT_AT[name] in program.read_text().splitlines()[line - 1]


SAID_OF_KEPT = {
    "second_backward_built_once": "note.retain_graph_becomes_gs110",
    "second_backward_built_once_unread": "note.retain_graph_keeps_old",
    "second_backward_shared_across_step": "note.retain_graph_costs",
}


@each("name", SAID_OF_KEPT)
def test_what_is_said_of_retain_graph_is_so(name, tmp_path):
    program = HERE / "life" / f"{name}.py"
    (diagnosis,) = [one for one in run_watched(program)[0].diagnoses if one.code in {"GS402", "GS403"}]
    assert {note.key for note in diagnosis.notes} & set(SAID_OF_KEPT.values()) == {SAID_OF_KEPT[name]}
    kept = tmp_path / "kept.py"
    kept.write_text(program.read_text().replace("backward()", "backward(retain_graph=True)"))
    assert bool(run_watched(kept)[1]) == (SAID_OF_KEPT[name] == "note.retain_graph_becomes_gs110")
