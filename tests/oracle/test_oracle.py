"""Random programs: gradsan says what the comparison with a run that never writes says, and heals to its gradients.

100 of them in short, 2,000 with ``--long``; ``benchmarks/fuzz.py`` runs as many more as one likes.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

import generate
import judge
import operations
import statements as s
from regressions import PROGRAMS

from cases import each
from gradsan.record.recorder import recorder

_PROGRAMS, _AT_ONCE = 2_000, 100
_IN_SHORT = 100

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize(
    "first",
    [
        *range(0, _IN_SHORT, _AT_ONCE),
        *(pytest.param(one, marks=pytest.mark.long) for one in range(_IN_SHORT, _PROGRAMS, _AT_ONCE)),
    ],
)
def test_the_report_agrees_with_the_oracle(first: int) -> None:
    # As in a process of their own: what earlier programs have left in the logs is looked through for each.
    recorder().core.clear()
    truths = [truth for seed in range(first, first + _AT_ONCE) if (truth := judge.accepted(generate.program(seed)))]
    assert len(truths) > 0.9 * _AT_ONCE
    assert {"right", "raises"} <= {truth.verdict for truth in truths}
    wrong = [
        f"{s.body(truth.program)}\n{complaints}"
        for truth, complaints in zip(truths, judge.complaints(truths), strict=True)
        if complaints
    ]
    assert not wrong, "\n\n".join(wrong)


@each("name", PROGRAMS)
def test_a_disagreement_of_the_past(name: str) -> None:
    program, verdict = PROGRAMS[name]
    truth = judge.accepted(program)
    assert truth is not None
    assert truth.verdict == verdict
    assert judge.complaints([truth]) == [[]]


@pytest.mark.parametrize(
    ("name", "heard"),
    [
        ("a leaf that was given other memory", "a silent error"),
        ("a value of which backward reads the sign", "no silent error"),
    ],
)
def test_the_oracle_can_tell(name: str, heard: str) -> None:
    """A judge who is given another truth complains of what gradsan says, and of what it heals to."""
    program, verdict = PROGRAMS[name]
    truth = judge.accepted(program)
    assert truth is not None
    other = truth.plain.seen if verdict == "wrong" else [[one * 2 for one in seen] for seen in truth.right]
    [complaints] = judge.complaints([judge.Truth(truth.program, truth.plain, other)])
    assert any(heard in one for one in complaints)
    assert any("heal: the gradients are not right" in one for one in complaints)


def test_every_in_place_method_is_in_the_list_or_left_out_for_a_reason() -> None:
    known = {match for one in operations.METHODS for match in re.findall(r"^\.(\w+_)\(", one.call)}
    left_out = {name for names in operations.LEFT_OUT.values() for name in names}
    every = {name for name in dir(torch.Tensor) if re.fullmatch(r"[a-z]\w*_", name)}
    assert every - known - left_out == set()
    assert known & left_out == set()
    assert (known | left_out) - every == set()
