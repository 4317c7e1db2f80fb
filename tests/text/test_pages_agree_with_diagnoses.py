"""The pages describe what gradsan says: watched, each example gets the page's own code, and each right version none."""

import runpy
import warnings

import pytest
import torch
from test_pages import CODES, FAILING, RIGHT, SILENT, WARNED, blocks, sections

import gradsan
from gradsan.capture.recorder import recorder
from gradsan.text import page


def diagnoses_of(source, folder):
    # Threads and storages get the numbers of earlier ones again; in one program that is rare, here it is the rule.
    recorder().core.clear()
    return diagnosed(source, folder)


def diagnosed(source, folder):
    program = folder / "example.py"
    program.write_text(source, encoding="utf-8")
    failure = None
    watched = gradsan.watch()
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            with watched:
                runpy.run_path(str(program))
    except RuntimeError as error:
        failure = error
    finally:
        torch.set_warn_always(False)
    return watched.diagnoses, failure


@pytest.mark.parametrize("code", CODES)
def test_a_failing_example_gets_the_code_of_its_page(code, tmp_path):
    (source,) = blocks(sections(page(code, "en"))[FAILING][1])
    diagnoses, failure = diagnoses_of(source, tmp_path)
    assert [diagnosis.code for diagnosis in diagnoses] == [code]
    assert f"`{diagnoses[0].cause}`" == page(code, "en").splitlines()[2]
    assert diagnoses[0].silent == (code in SILENT)
    assert (failure is None) == (code in SILENT | WARNED)


def right_versions():
    """All but the blocks that go wrong on purpose, to show that a check of one's own sees it."""
    for code in CODES:
        for number, source in enumerate(blocks(sections(page(code, "en"))[RIGHT][1])):
            if "except RuntimeError" not in source:
                yield pytest.param(source, id=f"{code}-{number + 1}")


@pytest.mark.parametrize("source", list(right_versions()))
def test_a_right_version_gets_no_diagnosis(source, tmp_path):
    diagnoses, failure = diagnoses_of(source, tmp_path)
    assert failure is None
    assert diagnoses == ()
