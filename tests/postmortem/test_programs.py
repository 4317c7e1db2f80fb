"""Autopsies of programs that were not watched, against the marks in their comments.

The first line of a program names the code and the tensor (``-``: not looked at); ``# saved``, ``# written`` and
``# used`` mark the lines that must be told. Everything written must lie on a marked line.
"""

import re
import runpy
import warnings
from pathlib import Path

import pytest

import gradsan
from cases import each

HERE = Path(__file__).parent
PROGRAMS = sorted((HERE / "programs").glob("*.py"))


def failed(program):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(RuntimeError) as caught:
            runpy.run_path(str(program), run_name="__main__")
    return caught.value


def marked(program):
    marks = {"saved": set(), "written": set(), "used": set()}
    for number, line in enumerate(program.read_text().splitlines(), 1):
        for word in re.findall(r"#((?: (?:saved|written|used))+)$", line):
            for role in word.split():
                marks[role].add(number)
    return marks


def told(diagnosis, role):
    return [label.frame.line for label in diagnosis.labels if label.role == role]


@each("program", PROGRAMS, ids=lambda path: path.stem)
def test_the_diagnosis_is_that_of_a_watched_run(program):
    code, tensor = program.read_text().splitlines()[0].lstrip("# ").split()
    (diagnosis,) = gradsan.explain_exception(failed(program)).diagnoses
    marks = marked(program)
    assert diagnosis.code == code
    assert tensor == "-" or diagnosis.tensor.name == tensor
    assert set(told(diagnosis, "saved")) & marks["saved"]
    assert set(told(diagnosis, "used")) == marks["used"]
    assert told(diagnosis, "written") == [], "nobody has seen a write"
    assert set(told(diagnosis, "suspect")) <= marks["written"]
    assert bool(told(diagnosis, "suspect")) == bool(marks["written"])
    assert all(Path(label.frame.file) == program for label in diagnosis.labels)
    assert diagnosis.confidence == ("likely" if told(diagnosis, "suspect") and is_sure(diagnosis) else "possible")
    assert any(note.key == f"note.autopsy.{diagnosis.confidence}" for note in diagnosis.notes)
    assert diagnosis.events == (), "nobody has seen when"


def is_sure(diagnosis):
    saved = [label.message.key for label in diagnosis.labels if label.role == "saved"]
    written = [label.message.key for label in diagnosis.labels if label.role == "suspect"]
    return saved == ["label.autopsy.likely"] and set(written) == {"label.autopsy.likely"}


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_report_shows_in_both_languages(language):
    text = str(gradsan.explain_exception(failed(PROGRAMS[0]), language=language))
    assert {"en": "nothing was watched", "zh": "运行时没有监视"}[language] in text


def test_a_value_within_a_chain_of_layers_is_not_called_by_the_argument_of_the_call():
    program = HERE / "programs" / "chain_called_directly.py"
    (diagnosis,) = gradsan.explain_exception(failed(program)).diagnoses
    assert diagnosis.tensor.name != "x"
