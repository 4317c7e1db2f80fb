"""Each page's example after a training that has gone on for long: every bounded log has forgotten its beginning."""

import pytest
import torch
from test_pages import CODES, FAILING, blocks, sections
from test_pages_agree_with_diagnoses import diagnosed

import gradsan
from gradsan.capture.recorder import recorder
from gradsan.text import page

WRITES, STEPS = 33_000, 600


@pytest.fixture
def long_run():
    core = recorder().core
    core.clear()
    weight, other = torch.nn.Parameter(torch.ones(3)), torch.zeros(3)
    optimizer = torch.optim.SGD([weight], lr=0.01)
    with gradsan.watch():
        for _ in range(STEPS):
            optimizer.zero_grad()
            (weight * other).sum().backward()
            optimizer.step()
        for _ in range(WRITES):
            other.add_(1)
    assert core.lost_writes_after(0)
    yield
    core.clear()


@pytest.mark.parametrize("code", CODES)
def test_a_failing_example_gets_the_code_of_its_page(code, long_run, tmp_path):
    (source,) = blocks(sections(page(code, "en"))[FAILING][1])
    diagnoses, _ = diagnosed(source, tmp_path)
    assert [diagnosis.code for diagnosis in diagnoses] == [code]
    notes = [note.key for diagnosis in diagnoses for note in diagnosis.notes]
    assert "note.log_was_cut" not in notes
