"""Searches for fixes of NaN and Inf: what passes, and what is compared where the program as written was not finite."""

from array import array
from dataclasses import replace
from math import fsum, sqrt

from gradsan.repair import Limits, find_fixes
from gradsan.repair.finite import finite_parts
from gradsan.repair.trials.trial import Gradients, Recording
from gradsan.text import say

WHERE = """
import torch

weight = torch.nn.Parameter(torch.tensor([4.0, 0.0, 1.0]))
optimizer = torch.optim.SGD([weight], lr=0.1)
for _ in range(3):
    optimizer.zero_grad()
    root = torch.where(weight > 0, torch.sqrt(weight), 0.0)
    (root.sum() - 1).square().backward()
    optimizer.step()
"""
ROWS = """
import torch

torch.manual_seed(0)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
inputs, targets = torch.randn(3, 4, 2), torch.randn(3, 4, 1)
inputs[1, 2] = float("nan")
for x, y in zip(inputs, targets):
    loss = (model(x) - y).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""

SPREAD = """
import torch

torch.manual_seed(0)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for rows in torch.randn(9, 2).split(4):
    wanted = rows.sum(1, keepdim=True)
    wanted = (wanted - wanted.mean()) / (wanted.std() + 1e-6)
    loss = (model(rows) - wanted).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def fixes_of(folder, monkeypatch, text):
    (folder / "train.py").write_text(text, encoding="utf-8")
    monkeypatch.chdir(folder)
    limits = Limits(timeout=300)
    found = find_fixes(("script", "train.py", ()), limits, lambda _: None, lambda one: say(one, "en"), folder)
    return found.diagnoses[0], {one.kind: one for one in found.diagnoses[0].fixes}


def test_a_safe_input_keeps_what_was_finite(tmp_path, monkeypatch):
    fault, fixes = fixes_of(tmp_path, monkeypatch, WHERE)
    assert fault.code == "GS602"
    assert next(kind for kind, one in fixes.items() if one.meaning == "preserved") == "double_where"
    assert fixes["double_where"].verification.training == "same"


def test_a_round_with_one_element_is_left_out_before_all_deviations_change(tmp_path, monkeypatch):
    fault, fixes = fixes_of(tmp_path, monkeypatch, SPREAD)
    assert (fault.code, fault.why.text.key) == ("GS601", "why.nonfinite_too_few")
    assert list(fixes) == ["leave_out_empty", "without_correction"]
    assert "if wanted.numel() < 2:" in fixes["leave_out_empty"].diff
    assert fixes["leave_out_empty"].verification.training == "same"


def test_rows_that_are_not_finite_are_dropped(tmp_path, monkeypatch):
    fault, fixes = fixes_of(tmp_path, monkeypatch, ROWS)
    assert fault.code == "GS604"
    assert {kind: one.verification.status for kind, one in fixes.items()} == {
        "drop_rows": "passed",
        "leave_out_batch": "passed",
    }


def gradients(*numbers):
    return Gradients("step 2", (((2,), array("d", numbers).tobytes(), sqrt(fsum(one * one for one in numbers))),))


def test_only_finite_values_are_compared():
    nan = float("nan")
    bad, good = ((gradients(1, 2), gradients(nan, 3), last) for last in (gradients(nan, nan), gradients(8, 9)))
    reference = Recording(steps=bad, backwards=bad, begun=(1.0, 2.0, nan))
    good = (good[0], gradients(7, 3), good[2])
    candidate = Recording(steps=good, backwards=good, begun=(1.0, 2.0, 3.0))
    parts = finite_parts(reference, candidate)
    assert parts.has_numbers
    assert parts.reference.steps == parts.candidate.steps == (gradients(1, 2), gradients(0, 3))
    assert parts.reference.begun == parts.candidate.begun == (1.0, 2.0)


def test_of_a_first_round_without_a_finite_loss_nothing_is_left():
    nan = float("nan")
    reference = Recording(steps=(gradients(nan, 0),), begun=(nan,))
    assert not finite_parts(reference, replace(reference, steps=(gradients(1, 2),), begun=(1.0,))).has_numbers
