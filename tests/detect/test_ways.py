"""Every way of writing × what was saved × watch and deep: gradsan's verdict is the truth.

The truth of a cell is found by running it without gradsan, beside the same program with the write left out (nothing
that backward needs is lost then): PyTorch *raises*, or the gradient is *wrong*, or it is *right*.
"""

from __future__ import annotations

import pytest
import torch

import gradsan
from ways import SAVED, WAYS, run, verdict

# What watch mode does not see (docs/blind-spots.md, "Writes past the version counter"): torch's own private ways to
# write without counting, taken by hand.
WATCH_MISSES = {
    "_unsafe_view, made before the save",
    "_unsafe_view, made after the save",
    "below ADInplaceOrView",
    "_unsafe_preserve_version_counter",
    "redispatch",
}


def truth_of(saved: str, way: str) -> str:
    right, _ = run(saved, None)
    gradient, said = run(saved, way)
    return "raises" if said else "right" if torch.equal(gradient, right) else "wrong"


@pytest.fixture(scope="module", params=SAVED)
def truths(request: pytest.FixtureRequest) -> tuple[str, dict[str, str]]:
    return request.param, {way: truth_of(request.param, way) for way in WAYS}


def expected(mode: str, way: str, truth: str) -> str:
    if mode == "watch" and way in WATCH_MISSES and truth == "wrong":
        return "right"
    return truth


# gradsan is on for all ways of a test together: to put its wrappers into torch takes longer than all of them.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode", ["watch", "deep"])
def test_the_verdict_is_the_truth(mode: str, truths: tuple[str, dict[str, str]]) -> None:
    saved, truth = truths
    plain = {way: run(saved, way) for way in WAYS}
    surprises = []
    with gradsan.watch(mode):
        for way in WAYS:
            with gradsan.watch(mode) as watched:
                gradient, said = run(saved, way)
            found = verdict(watched.diagnoses)
            if found != expected(mode, way, truth[way]):
                surprises.append((way, truth[way], [(one.code, one.severity) for one in watched.diagnoses]))
            right_error, right_gradient = plain[way][1], plain[way][0]
            if said != right_error or (said is None and not torch.equal(gradient, right_gradient)):
                surprises.append((way, "not as without gradsan", said))
    assert surprises == []


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("saved", SAVED)
def test_healed_it_is_right(saved: str) -> None:
    right, _ = run(saved, None)
    wrong = []
    with gradsan.watch("heal"):
        for way in WAYS:
            gradient, said = run(saved, way)
            if said is not None or not torch.equal(gradient, right):
                wrong.append((way, said))
    assert wrong == []
